//! Causes of failed transfers: the first one is told once, with the rank, engine and daemon where it arose and how things stood
//! there, however many ranks it goes through. Its parts travel apart, and are put into words where an engine is told.

use kvferry_control::{Fault, Side};
use kvferry_handshake::Code;
use serde::{Deserialize, Serialize};

use crate::faults::{MAX_MESSAGE, clamp, clamp_text};

/// Longest text of a standing in bytes.
pub(crate) const MAX_STANDING: usize = 512;
/// Longest first message in bytes of a cause that is only remembered, and of each text that says where it arose. Tables of what
/// ended are bounded by the number of entries ([`crate::Limits`]), so an entry must be small: with its transfer id and names
/// it stays below 1.5 KiB.
const MAX_REMEMBERED: (usize, usize) = (256, 64);

/// Why a transfer failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// What whoever hears of it is told: the first cause's code, or `sibling_failed`.
    pub code: Code,
    /// What went wrong first, in the words of whoever noticed it.
    pub first: Fault,
    /// With which rank; `None` until a rank fails of it.
    pub arose: Option<Box<Arose>>,
}

/// Where a cause arose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arose {
    /// With which rank.
    pub at: Place,
    /// How the transfer stood there, where it had begun.
    pub standing: Option<Standing>,
}

/// A rank on one side of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Which side.
    pub side: Side,
    /// The rank.
    pub rank: u32,
    /// Its engine.
    pub engine: String,
    /// `host:port` of its daemon.
    pub daemon: String,
}

/// How a transfer stood with one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// What it was about.
    pub phase: String,
    /// Whom it waited for, or moved bytes with.
    pub peer: String,
    /// What was wrong meanwhile; empty where nothing is known.
    pub trouble: String,
    /// Bytes done.
    pub bytes: u64,
    /// Of so many, where that is known.
    pub total: Option<u64>,
}

impl From<Fault> for Cause {
    fn from(first: Fault) -> Cause {
        Cause {
            code: first.code,
            first,
            arose: None,
        }
    }
}

impl Cause {
    /// The rank of which it is known to be, unless it named one itself.
    pub(crate) fn of(mut self, place: impl FnOnce() -> Place) -> Cause {
        self.arose.get_or_insert_with(|| Arose::with(place()));
        self
    }

    /// A rank fails of it that stood like this: it arose there, unless it arose elsewhere.
    pub(crate) fn at(mut self, place: &Place, standing: Option<&Standing>) -> Cause {
        let arose = self.arose.get_or_insert_with(|| Arose::with(place.clone()));
        if arose.at == *place && arose.standing.is_none() {
            arose.standing = standing.cloned();
        }
        self
    }

    /// What the other ranks of the same side are told: codes that say what happened to the transfer stay,
    /// those that say what happened to one rank become `sibling_failed`.
    pub(crate) fn for_sibling(&self) -> Cause {
        let stays = matches!(
            self.code,
            Code::Aborted
                | Code::Superseded
                | Code::Declined
                | Code::LeaseExpired
                | Code::Short
                | Code::Deadline
                | Code::LinkRefused
                | Code::VerdictsDiffer
                | Code::PathRequired
        );
        Cause {
            code: if stays { self.code } else { Code::SiblingFailed },
            ..self.clone()
        }
    }

    /// What is remembered of it: its mismatches are only counted. Who fetches again is told them by the link.
    pub(crate) fn remembered(&self) -> Cause {
        let (message, name) = MAX_REMEMBERED;
        let mut kept = self.clone();
        clamp_text(&mut kept.first.message, message);
        if !kept.first.mismatches.is_empty() {
            let count = kept.first.mismatches.len();
            kept.first.message = format!("{} ({count} mismatches)", kept.first.message);
            kept.first.mismatches = Vec::new();
        }
        if let Some(arose) = &mut kept.arose {
            clamp_text(&mut arose.at.engine, name);
            clamp_text(&mut arose.at.daemon, name);
            if let Some(standing) = &mut arose.standing {
                standing
                    .texts()
                    .into_iter()
                    .for_each(|text| clamp_text(text, name));
            }
        }
        kept
    }

    /// Shortens it to what a message may carry.
    pub(crate) fn clamp(&mut self) {
        clamp(&mut self.first);
        if let Some(standing) = self.arose.as_mut().and_then(|arose| arose.standing.as_mut()) {
            standing
                .texts()
                .into_iter()
                .for_each(|text| clamp_text(text, MAX_STANDING));
        }
    }

    /// In words, for a call that is refused because of it.
    pub(crate) fn told(&self) -> Fault {
        let standing = self.arose.as_ref().and_then(|arose| {
            let standing = arose.standing.as_ref()?;
            Some(format!(" [{}]", standing.told(arose.at.side)))
        });
        self.worded(
            self.arose.as_ref().map(|arose| &arose.at),
            &standing.unwrap_or_default(),
        )
    }

    /// In words, for a rank whose transfer ended so: with how it stood there, where it did not arise there.
    pub(crate) fn told_to(&self, place: &Place, stood: &Standing) -> Fault {
        let arose = self.arose.as_ref();
        let own = arose.is_none_or(|arose| arose.at == *place);
        let there = arose.and_then(|arose| arose.standing.as_ref().map(|standing| (arose.at.side, standing)));
        if own {
            // As it stood when the cause arose, with the bytes of the end.
            let then = there.map_or(stood, |(_, standing)| standing);
            let then = Standing {
                bytes: stood.bytes,
                total: stood.total,
                ..then.clone()
            };
            return self.worded(None, &format!(" [{}]", then.told(place.side)));
        }
        let there = there.map(|(side, standing)| format!(" [{}]", standing.told(side)));
        let here = format!(" [here: {}]", stood.told(place.side));
        let at = arose.map(|arose| &arose.at);
        self.worded(at, &format!("{}{here}", there.unwrap_or_default()))
    }

    /// The rest gives way to where it arose and how things stood.
    fn worded(&self, at: Option<&Place>, behind: &str) -> Fault {
        let mut words = at.map_or_else(String::new, |at| {
            format!("rank {} of engine {} at {}: ", at.rank, at.engine, at.daemon)
        });
        if self.code != self.first.code {
            words.push_str(&format!("{}: ", self.first.code));
        }
        let mut message = self.first.message.clone();
        clamp_text(
            &mut message,
            MAX_MESSAGE.saturating_sub(words.len() + behind.len()),
        );
        let mut told = Fault {
            code: self.code,
            message: format!("{words}{message}{behind}"),
            mismatches: self.first.mismatches.clone(),
        };
        clamp(&mut told);
        told
    }
}

impl Arose {
    fn with(at: Place) -> Box<Arose> {
        Box::new(Arose { at, standing: None })
    }
}

impl Standing {
    fn texts(&mut self) -> [&mut String; 3] {
        [&mut self.phase, &mut self.peer, &mut self.trouble]
    }

    fn told(&self, side: Side) -> String {
        let trouble = match self.trouble.as_str() {
            "" => String::new(),
            trouble => format!("; {trouble}"),
        };
        let total = self
            .total
            .map_or_else(String::new, |total| format!(" of {total}"));
        format!(
            "{}, {} {}{trouble}; {}{total} bytes done",
            side.name(),
            self.phase,
            self.peer,
            self.bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::Mismatch;

    use super::*;
    use crate::faults::MAX_MISMATCHES;

    fn place(side: Side, rank: u32) -> Place {
        Place {
            side,
            rank,
            engine: "e".to_owned(),
            daemon: format!("node{rank}:1"),
        }
    }

    fn standing(phase: &str, bytes: u64) -> Standing {
        Standing {
            phase: phase.to_owned(),
            peer: "x".to_owned(),
            bytes,
            ..Standing::default()
        }
    }

    #[test]
    fn a_cause_is_told_once_however_many_ranks_it_went_through() {
        let first = Cause::from(Fault::new(Code::EngineGone, "closed"));
        let arose = place(Side::Publish, 0);
        let mut cause = first.at(&arose, Some(&standing("final, to", 7)));
        assert_eq!(
            cause.told_to(&arose, &standing("other, to", 9)).message,
            "closed [publish, final, to x; 9 bytes done]"
        );
        let mut told = String::new();
        for rank in 1..100 {
            let here = place(Side::Fetch, rank);
            cause = cause.for_sibling().at(&here, Some(&standing("moving from", 1)));
            told = cause.told_to(&here, &standing("moving from", 3)).message;
        }
        assert_eq!(cause.code, Code::SiblingFailed);
        assert_eq!(
            told,
            "rank 0 of engine e at node0:1: engine_gone: closed [publish, final, to x; 7 bytes done] \
             [here: fetch, moving from x; 3 bytes done]"
        );
    }

    #[test]
    fn where_it_arose_and_how_it_stands_outlive_a_long_message() {
        let cause = Cause::from(Fault::new(Code::Deadline, "é".repeat(MAX_MESSAGE)));
        let cause = cause.at(&place(Side::Publish, 3), Some(&standing("final, to", 7)));
        let told = cause.told_to(&place(Side::Fetch, 0), &standing("moving from", 3));
        assert!(told.message.len() <= MAX_MESSAGE, "{}", told.message.len());
        assert!(told.message.starts_with("rank 3 of engine e at node3:1: é"));
        assert!(
            told.message
                .ends_with("; 7 bytes done] [here: fetch, moving from x; 3 bytes done]")
        );
        let mut hostile = Cause::from(Fault::new(Code::Deadline, "m".repeat(9999)));
        let long = Standing {
            trouble: "t".repeat(9999),
            ..standing(&"p".repeat(9999), 1)
        };
        hostile = hostile.at(&place(Side::Publish, 3), Some(&long));
        assert!(hostile.told_to(&place(Side::Fetch, 0), &long).message.len() <= MAX_MESSAGE);
        hostile.clamp();
        let standing = hostile.arose.unwrap().standing.unwrap();
        assert_eq!([standing.phase.len(), standing.trouble.len()], [MAX_STANDING; 2]);
        assert_eq!(hostile.first.message.len(), MAX_MESSAGE);
    }

    #[test]
    fn what_is_remembered_of_a_cause_is_small() {
        let mismatch = Mismatch {
            code: Code::PageSize,
            field: "f".repeat(MAX_MESSAGE),
            prefill: "p".repeat(MAX_MESSAGE),
            decode: "d".repeat(MAX_MESSAGE),
            why: "w".repeat(MAX_MESSAGE),
            fix: "x".repeat(MAX_MESSAGE),
        };
        let first = Fault {
            mismatches: vec![mismatch; MAX_MISMATCHES],
            ..Fault::new(Code::LinkRefused, "é".repeat(MAX_MESSAGE))
        };
        let long = "n".repeat(MAX_STANDING);
        let at = Place {
            engine: long.clone(),
            ..place(Side::Fetch, 1)
        };
        let standing = Standing {
            peer: long.clone(),
            trouble: long.clone(),
            ..standing(&long, 1)
        };
        let kept = Cause::from(first).at(&at, Some(&standing)).remembered();
        assert!(kept.first.mismatches.is_empty());
        assert!(
            kept.first.message.ends_with(" (256 mismatches)"),
            "{}",
            kept.first.message
        );
        assert!(kept.told().message.len() <= 700, "{}", kept.told().message.len());
    }

    #[test]
    fn one_ranks_misfortune_is_not_its_siblings() {
        let gone = Cause::from(Fault::new(Code::EngineGone, "closed")).for_sibling();
        assert_eq!(
            (gone.code, gone.first.code),
            (Code::SiblingFailed, Code::EngineGone)
        );
        let aborted = Cause::from(Fault::new(Code::Aborted, "")).for_sibling();
        assert_eq!(aborted.code, Code::Aborted);
    }
}
