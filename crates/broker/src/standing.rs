//! Where transfers stand, in words, for causes: phase, peers and bytes done.

use kvferry_control::Fault;

use crate::Broker;
use crate::faults::behind;
use crate::fetches::{Fetch, Stage};
use crate::publishes::Publish;
use crate::wanted::{Heard, Wanted};

/// Where a transfer stood when it began to end.
#[derive(Clone, Debug)]
pub(crate) struct Stood {
    phase: String,
    /// As its cause tells it, if the cause arose here: with the bytes of then.
    told: String,
}

impl Stood {
    /// Whether the cause arose here, and then.
    pub(crate) fn is_told_by(&self, cause: &Fault) -> bool {
        cause.message.contains(&self.told)
    }

    /// The cause for the rank itself: it tells the rank's own phase and its bytes, those of the report. Bytes of another rank,
    /// whose failure it may be, stay beside them, behind that one's name.
    pub(crate) fn at_end(&self, cause: Fault, bytes: u64, total: Option<u64>) -> Fault {
        let done = done(bytes, total);
        if self.is_told_by(&cause) {
            let told = format!("{}; {done}", self.phase);
            return Fault {
                message: cause.message.replace(&self.told, &told),
                ..cause
            };
        }
        behind(cause, &format!(" [here: {}; {done}]", self.phase))
    }
}

fn done(bytes: u64, total: Option<u64>) -> String {
    match total {
        Some(total) => format!("{bytes} of {total} bytes done"),
        None => format!("{bytes} bytes done"),
    }
}

impl Fetch {
    pub(crate) fn stood(&self) -> Stood {
        Stood {
            phase: self.phase(),
            told: self.standing(),
        }
    }

    /// Phase, peer and bytes done, for causes.
    pub(crate) fn standing(&self) -> String {
        let bytes = self.parts.values().map(|part| part.bytes).sum();
        // What is under way counts for no more than a sign of life.
        let more = if self.alive > self.progress {
            ", more under way"
        } else {
            ""
        };
        format!("{}; {}{more}", self.phase(), done(bytes, Some(self.total())))
    }

    pub(crate) fn total(&self) -> u64 {
        self.parts.values().map(|part| part.total).sum()
    }

    fn phase(&self) -> String {
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
        let phase = if matches!(self.stage, Stage::Behind) {
            format!(
                "waiting until its lower attempt has ended, to fetch from {} at {}",
                self.link.name, self.link.home.0
            )
        } else if matches!(self.stage, Stage::Linking) {
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
        format!("fetch, {phase}")
    }
}

impl Publish {
    /// `under_way`: bytes done of jobs that are open.
    pub(crate) fn stood(&self, under_way: u64) -> Stood {
        Stood {
            phase: self.phase(),
            told: self.standing(under_way),
        }
    }

    /// Phase, peers and bytes done, for causes.
    pub(crate) fn standing(&self, under_way: u64) -> String {
        let bytes = self.tallies.bytes() + under_way;
        format!("{}; {}", self.phase(), done(bytes, None))
    }

    fn phase(&self) -> String {
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
            let ended = self.servings.keys();
            let ended: Vec<String> = ended
                .map(|engine| format!("engine {} at {}", engine.name, engine.home))
                .collect();
            match ended.is_empty() {
                true => "waiting for a decode engine".to_owned(),
                false => format!("{} ended", ended.join(", ")),
            }
        } else {
            serving.join(", ")
        };
        format!("publish, {phase}, {} tokens ready; {serving}", self.ready.tokens)
    }
}

impl Broker {
    /// Where a publish stands, for causes.
    pub(crate) fn publish_stands(&self, publish: &Publish) -> String {
        publish.standing(self.under_way(publish))
    }

    /// Bytes done of a publish's open jobs; of closed ones, the tallies know.
    pub(crate) fn under_way(&self, publish: &Publish) -> u64 {
        let parts = publish.parts.iter().filter_map(|key| self.announced.get(key));
        parts
            .filter(|part| part.job.is_some())
            .map(|part| part.bytes)
            .sum()
    }
}
