//! Where transfers stand, for causes: phase, peers, what is wrong with them, and bytes done.

use std::collections::BTreeMap;

use kvferry_control::{Fault, Side};

use crate::Broker;
use crate::announced::{Part, PartKey};
use crate::cause::{MAX_STANDING, Place, Standing};
use crate::faults::clamp_text;
use crate::fetches::{Fetch, Stage};
use crate::io::{Micros, PeerAddress};
use crate::publishes::{Publish, PublishKey};
use crate::ranks::RankLife;
use crate::servings::Serving;
use crate::wanted::{Heard, Wanted};

/// Most ranks that one phase names.
const MAX_NAMED: usize = 8;

/// What last went wrong between this daemon and peers that are up: lanes that broke, words that were dropped.
#[derive(Debug, Default)]
pub(crate) struct Troubles {
    last: BTreeMap<PeerAddress, (Micros, String)>,
}

impl Troubles {
    pub(crate) fn forget(&mut self, peer: &PeerAddress) {
        self.last.remove(peer);
    }
}

impl Broker {
    /// Something went wrong with a peer that is up; causes name it where nothing moves any more since.
    pub(crate) fn note_trouble(&mut self, peer: &PeerAddress, mut what: String) {
        if self.peers.contains_key(peer) {
            clamp_text(&mut what, MAX_STANDING / 2);
            self.troubles.last.insert(peer.clone(), (self.now, what));
        }
    }

    /// The newest trouble with those peers since they last brought something forward.
    fn trouble<'p>(&self, peers: impl Iterator<Item = (&'p PeerAddress, Micros)>) -> String {
        let since = peers.filter_map(|(peer, moved)| {
            let (at, what) = self.troubles.last.get(peer)?;
            (*at >= moved).then_some((*at, peer, what))
        });
        since.max().map_or_else(String::new, |(at, peer, what)| {
            let before = self.now.saturating_sub(at) / 100_000;
            format!(
                "{}.{} s before, with {}: {what}",
                before / 10,
                before % 10,
                peer.0
            )
        })
    }

    /// A rank attached here, on one side.
    pub(crate) fn place(&self, life: RankLife, side: Side) -> Place {
        let rank = self.ranks.get(life);
        Place {
            side,
            rank: rank.map_or(0, |rank| rank.rank),
            engine: rank.map_or_else(String::new, |rank| rank.envelope.identity.engine.clone()),
            daemon: self.own().0.to_string(),
        }
    }

    pub(crate) fn fetch_stands(&self, fetch: &Fetch) -> Standing {
        let (phase, mut peer) = fetch.phase();
        clamp_text(&mut peer, MAX_STANDING);
        let unfinished = fetch.parts.values().filter(|part| !part.is_done());
        let mut trouble = self.trouble(unfinished.map(|part| (&part.seat.peer, part.moved)));
        // What is under way counts for no more than a sign of life.
        if trouble.is_empty() && fetch.alive > fetch.progress {
            "more under way".clone_into(&mut trouble);
        }
        Standing {
            phase: phase.to_owned(),
            peer,
            trouble,
            bytes: fetch.parts.values().map(|part| part.bytes).sum(),
            total: Some(fetch.total()),
        }
    }

    pub(crate) fn publish_stands(&self, publish: &Publish) -> Standing {
        let open = || publish.servings.iter().filter(|(_, one)| one.outcome.is_none());
        let serving: Vec<String> = open()
            .map(|(engine, serving)| {
                let doing = self.serving_stands(publish, serving);
                format!("engine {} at {}: {doing}", engine.name, engine.home)
            })
            .collect();
        let mut peer = if !serving.is_empty() {
            serving.join(", ")
        } else if publish.servings.is_empty() {
            "waiting for a decode engine".to_owned()
        } else {
            let ended = publish.servings.keys();
            let ended: Vec<String> = ended
                .map(|engine| format!("engine {} at {}", engine.name, engine.home))
                .collect();
            format!("{} ended", ended.join(", "))
        };
        clamp_text(&mut peer, MAX_STANDING);
        let parts = open().flat_map(|(_, serving)| self.undelivered(serving));
        let phase = if publish.end().is_none() {
            "not final yet"
        } else {
            "final"
        };
        Standing {
            phase: format!("{phase}, {} tokens ready;", publish.ready.tokens),
            peer,
            trouble: self.trouble(parts.map(|(key, part)| (&key.peer, part.moved))),
            bytes: publish.tallies.bytes() + self.under_way(publish),
            total: None,
        }
    }

    fn undelivered<'b>(&'b self, serving: &'b Serving) -> impl Iterator<Item = (&'b PartKey, &'b Part)> {
        let taken = serving.taken.iter();
        let open = taken.filter(|(rank, _)| !serving.has_delivered(**rank));
        open.filter_map(|(_, key)| Some((key, self.announced.get(key)?)))
    }

    /// What one decode engine's ranks wait for, each by name: those that did not come, those that lack bytes, and those whose
    /// word is missing.
    fn serving_stands(&self, publish: &Publish, serving: &Serving) -> String {
        let absent: Vec<String> = (0..serving.of)
            .filter(|rank| !serving.taken.contains_key(rank))
            .map(|rank| rank.to_string())
            .collect();
        let (mut lacking, mut sent) = (Vec::new(), Vec::new());
        for (key, part) in self.undelivered(serving) {
            let (name, due) = (
                format!("{} at {}", part.decode_rank, key.peer.0),
                part.due(publish),
            );
            if part.bytes < due {
                lacking.push(format!("{name} ({} of {due} bytes)", part.bytes));
            } else {
                sent.push(name);
            }
        }
        let mut doing = Vec::new();
        if !lacking.is_empty() {
            doing.push(format!("moving to its rank {}", some(&lacking)));
        }
        if !absent.is_empty() {
            doing.push(format!("waiting for the fetch of its rank {}", some(&absent)));
        }
        if !sent.is_empty() && publish.end().is_some() {
            doing.push(format!(
                "all bytes sent; waiting for word of its rank {}",
                some(&sent)
            ));
        }
        if doing.is_empty() {
            doing.push(match publish.end() {
                None => "all that is ready was sent".to_owned(),
                Some(_) => "its ranks are ending".to_owned(),
            });
        }
        doing.join("; ")
    }

    /// Bytes done of a publish's open jobs; of closed ones, the tallies know.
    pub(crate) fn under_way(&self, publish: &Publish) -> u64 {
        let parts = publish.parts.iter().filter_map(|key| self.announced.get(key));
        parts
            .filter(|part| part.job.is_some())
            .map(|part| part.bytes)
            .sum()
    }

    /// How a transfer that came to nothing is told to its rank.
    pub(crate) fn stuck(&self) -> Fault {
        let seconds = self.config.deadline_us / 1_000_000;
        Fault::new(
            kvferry_handshake::Code::Deadline,
            format!("nothing went forward for {seconds} s"),
        )
    }

    /// The publish's place, and how it stands.
    pub(crate) fn publish_at(&self, key: &PublishKey) -> Option<(Place, Standing)> {
        let publish = self.publishes.get(key)?;
        Some((self.place(key.0, Side::Publish), self.publish_stands(publish)))
    }

    /// The same of a fetch.
    pub(crate) fn fetch_at(&self, number: u64) -> Option<(Place, Standing)> {
        let fetch = self.fetches.get(number)?;
        Some((self.place(fetch.rank, Side::Fetch), self.fetch_stands(fetch)))
    }
}

fn some(names: &[String]) -> String {
    let more = if names.len() > MAX_NAMED { ", ..." } else { "" };
    format!("{}{more}", names[..names.len().min(MAX_NAMED)].join(", "))
}

impl Part {
    /// Bytes that the publish, as far as it is, has for this one.
    fn due(&self, publish: &Publish) -> u64 {
        let Some(map) = &self.map else {
            return 0;
        };
        match publish.end() {
            Some(end) => map.cut(end).total_bytes(),
            None => (0..map.chunks())
                .filter(|chunk| map.is_ready(*chunk, &publish.ready))
                .map(|chunk| map.chunk_bytes(chunk))
                .sum(),
        }
    }
}

impl Fetch {
    pub(crate) fn total(&self) -> u64 {
        self.parts.values().map(|part| part.total).sum()
    }

    /// What it is about, and with whom.
    fn phase(&self) -> (&'static str, String) {
        let home = || format!("{} at {}", self.link.name, self.link.home.0);
        match self.stage {
            Stage::Behind => {
                return ("waiting until its lower attempt has ended, to fetch from", home());
            }
            Stage::Linking => return ("waiting for the link with", home()),
            Stage::Moving | Stage::Ending(_) => {}
        }
        let ranks = |wanted: fn(&Wanted) -> bool| -> Vec<String> {
            let parts = self.parts.iter().filter(|(_, part)| wanted(part));
            parts
                .map(|(rank, part)| format!("{rank} at {}", part.seat.peer.0))
                .collect()
        };
        type Waits = (&'static str, fn(&Wanted) -> bool);
        let waits: [Waits; 3] = [
            ("waiting for an answer of", |part| {
                matches!(part.heard, Heard::Nothing)
            }),
            ("waiting for the publish of", |part| {
                matches!(part.heard, Heard::Waiting)
            }),
            ("waiting for the final publish of", |part| {
                matches!(part.heard, Heard::Ready(_))
            }),
        ];
        for (phase, heard) in waits {
            let ranks = ranks(heard);
            if !ranks.is_empty() {
                return (phase, format!("prefill rank {}", some(&ranks)));
            }
        }
        let lacking = self.parts.iter().filter(|(_, part)| !part.is_done());
        let lacking: Vec<String> = lacking
            .map(|(rank, part)| {
                let (peer, bytes, total) = (&part.seat.peer.0, part.bytes, part.total);
                format!("{rank} at {peer} ({bytes} of {total} bytes)")
            })
            .collect();
        ("moving from", format!("prefill rank {}", some(&lacking)))
    }
}
