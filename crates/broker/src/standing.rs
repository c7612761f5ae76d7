//! Where transfers stand, in words, for causes: phase, peers and bytes done.

use crate::fetches::{Fetch, Stage};
use crate::publishes::Publish;
use crate::wanted::{Heard, Wanted};

impl Fetch {
    /// Phase, peer and bytes done, for causes.
    pub(crate) fn standing(&self) -> String {
        let at = |ranks: &[(u32, &Wanted)]| {
            let names: Vec<String> = ranks
                .iter()
                .take(8)
                .map(|(rank, part)| format!("{rank} at {}", part.seat.peer.0))
                .collect();
            let more = if ranks.len() > 8 { ", ..." } else { "" };
            format!("{}{more}", names.join(", "))
        };
        let parts = |heard: fn(&Heard) -> bool| -> Vec<(u32, &Wanted)> {
            let parts = self.parts.iter().filter(|(_, part)| heard(&part.heard));
            parts.map(|(rank, part)| (*rank, part)).collect()
        };
        let (silent, unpublished, unfinished) = (
            parts(|heard| matches!(heard, Heard::Nothing)),
            parts(|heard| matches!(heard, Heard::Waiting)),
            parts(|heard| matches!(heard, Heard::Ready(_))),
        );
        let phase = if matches!(self.stage, Stage::Linking) {
            format!(
                "waiting for the link with {} at {}",
                self.link.name, self.link.home.0
            )
        } else if !silent.is_empty() {
            format!("waiting for an answer of prefill rank {}", at(&silent))
        } else if !unpublished.is_empty() {
            format!("waiting for the publish of prefill rank {}", at(&unpublished))
        } else if !unfinished.is_empty() {
            format!(
                "waiting for the final publish of prefill rank {}",
                at(&unfinished)
            )
        } else {
            let moving: Vec<_> = self.parts.iter().filter(|(_, part)| !part.is_done()).collect();
            let moving: Vec<_> = moving.into_iter().map(|(rank, part)| (*rank, part)).collect();
            format!("moving from prefill rank {}", at(&moving))
        };
        let done: u64 = self.parts.values().map(|part| part.bytes).sum();
        let total: u64 = self.parts.values().map(|part| part.total).sum();
        format!("fetch, {phase}; {done} of {total} bytes done")
    }
}

impl Publish {
    /// Phase, peers and bytes done, for causes.
    pub(crate) fn standing(&self) -> String {
        let mut serving = Vec::new();
        for (engine, serving_it) in self
            .servings
            .iter()
            .filter(|(_, serving)| serving.outcome.is_none())
        {
            let missing: Vec<String> = (0..serving_it.of)
                .filter(|rank| !serving_it.taken.contains_key(rank))
                .take(8)
                .map(|rank| rank.to_string())
                .collect();
            let doing = if missing.is_empty() {
                "moving to it".to_owned()
            } else {
                format!("waiting for the fetch of its rank {}", missing.join(", "))
            };
            serving.push(format!("engine {} at {}: {doing}", engine.name, engine.home));
        }
        let phase = if self.end().is_none() {
            "not final yet"
        } else {
            "final"
        };
        let serving = if serving.is_empty() {
            "waiting for a decode engine".to_owned()
        } else {
            serving.join(", ")
        };
        format!(
            "publish, {phase}, {} tokens ready; {serving}; {} bytes done",
            self.ready.tokens,
            self.tallies.bytes()
        )
    }
}
