//! How causes are worded and passed on: each names peer, phase and bytes done, and stays bounded.

use kvferry_control::Fault;
use kvferry_handshake::{Code, Mismatch};

/// Longest message in bytes; causes are passed from daemon to daemon and must not grow on the way.
pub(crate) const MAX_MESSAGE: usize = 2048;
/// Most mismatches that a cause carries.
pub(crate) const MAX_MISMATCHES: usize = 256;
/// Longest message in bytes of a cause that is only remembered. Tables of what ended are bounded by the number of
/// entries ([`crate::Limits`]), so an entry must be small: with its transfer id and names it stays below 1.5 KiB.
const MAX_REMEMBERED: usize = 512;

pub(crate) fn shutting_down() -> Fault {
    Fault::new(Code::Shutdown, "the daemon is shutting down")
}

/// A planner's refusal.
pub(crate) fn from_plan(error: kvferry_plan::PlanError) -> Fault {
    Fault::new(error.code, error.message)
}

/// How phases begin, in causes: see [`crate::standing`].
const PHASES: [&str; 2] = [" [fetch, ", " [publish, "];

/// The same cause with the phase in which it struck, unless it names that of the rank that failed already.
pub(crate) fn in_phase(cause: &Fault, phase: impl FnOnce() -> String) -> Fault {
    let named = PHASES.iter().any(|begin| cause.message.contains(begin));
    let message = if named {
        cause.message.clone()
    } else {
        format!("{} [{}]", cause.message, phase())
    };
    bounded(Fault {
        code: cause.code,
        message,
        mismatches: cause.mismatches.clone(),
    })
}

/// The same cause with something behind it, bounded: the rest gives way.
pub(crate) fn behind(mut cause: Fault, words: &str) -> Fault {
    clamp_text(&mut cause.message, MAX_MESSAGE.saturating_sub(words.len()));
    cause.message.push_str(words);
    bounded(cause)
}

/// What is remembered of a cause: its mismatches are only counted. Who fetches again is told them by the link.
pub(crate) fn remembered(cause: &Fault) -> Fault {
    let mut message = cause.message.clone();
    clamp_text(&mut message, MAX_REMEMBERED);
    if !cause.mismatches.is_empty() {
        message = format!("{message} ({} mismatches)", cause.mismatches.len());
    }
    Fault::new(cause.code, message)
}

/// What another daemon said, bounded.
pub(crate) fn from_peer(cause: Fault, who: &str) -> Fault {
    bounded(Fault {
        message: format!("{who}: {}", cause.message),
        ..cause
    })
}

/// What the other ranks of the same side are told: codes that say what happened to the transfer stay,
/// those that say what happened to one rank become `sibling_failed`.
pub(crate) fn for_sibling(cause: &Fault, rank: u32) -> Fault {
    let stays = matches!(
        cause.code,
        Code::Aborted
            | Code::Superseded
            | Code::Declined
            | Code::LeaseExpired
            | Code::Short
            | Code::Deadline
            | Code::LinkRefused
            | Code::VerdictsDiffer
            | Code::PathRequired
            | Code::SiblingFailed
    );
    if stays {
        return bounded(Fault {
            message: format!("rank {rank}: {}", cause.message),
            ..cause.clone()
        });
    }
    bounded(Fault {
        code: Code::SiblingFailed,
        message: format!("rank {rank} failed: {}: {}", cause.code, cause.message),
        mismatches: cause.mismatches.clone(),
    })
}

fn bounded(mut cause: Fault) -> Fault {
    clamp(&mut cause);
    cause
}

/// Shortens a cause to what a message may carry.
pub(crate) fn clamp(cause: &mut Fault) {
    clamp_text(&mut cause.message, MAX_MESSAGE);
    cause.mismatches.truncate(MAX_MISMATCHES);
    cause.mismatches.iter_mut().for_each(clamp_mismatch);
}

pub(crate) fn clamp_mismatch(mismatch: &mut Mismatch) {
    for text in [
        &mut mismatch.field,
        &mut mismatch.prefill,
        &mut mismatch.decode,
        &mut mismatch.why,
        &mut mismatch.fix,
    ] {
        clamp_text(text, MAX_MESSAGE);
    }
}

fn clamp_text(text: &mut String, most: usize) {
    if text.len() > most {
        let mut at = most;
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        text.truncate(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_stays_bounded_however_often_it_is_passed_on() {
        let mut cause = Fault::new(Code::Deadline, "é".repeat(500));
        for _ in 0..100 {
            cause = in_phase(&from_peer(cause, "node:1"), || "fetch, moving".to_owned());
        }
        assert!(cause.message.len() <= MAX_MESSAGE);
        assert!(cause.message.starts_with("node:1: "));
    }

    #[test]
    fn a_cause_names_the_phase_of_the_rank_that_failed_and_no_other() {
        let at_first = in_phase(&Fault::new(Code::Deadline, "stalled"), || {
            "publish, final".to_owned()
        });
        assert_eq!(at_first.message, "stalled [publish, final]");
        let told = from_peer(for_sibling(&at_first, 1), "node:1");
        let passed_on = in_phase(&told, || "fetch, moving".to_owned());
        assert_eq!(passed_on.message, "node:1: rank 1: stalled [publish, final]");
    }

    #[test]
    fn what_is_remembered_of_a_cause_is_small() {
        let mut cause = Fault::new(Code::LinkRefused, "é".repeat(MAX_MESSAGE));
        let mismatch = Mismatch {
            code: Code::PageSize,
            field: "f".repeat(MAX_MESSAGE),
            prefill: "p".repeat(MAX_MESSAGE),
            decode: "d".repeat(MAX_MESSAGE),
            why: "w".repeat(MAX_MESSAGE),
            fix: "x".repeat(MAX_MESSAGE),
        };
        cause.mismatches = vec![mismatch; MAX_MISMATCHES];
        let kept = remembered(&cause);
        assert!(kept.mismatches.is_empty() && kept.message.len() <= MAX_REMEMBERED + 40);
        assert!(kept.message.ends_with(" (256 mismatches)"), "{}", kept.message);
        assert_eq!(kept.code, Code::LinkRefused);
    }

    #[test]
    fn one_ranks_misfortune_is_not_its_siblings() {
        let gone = for_sibling(&Fault::new(Code::EngineGone, "closed"), 3);
        assert_eq!(gone.code, Code::SiblingFailed);
        assert!(gone.message.contains("rank 3") && gone.message.contains("engine_gone"));
        assert_eq!(for_sibling(&Fault::new(Code::Aborted, ""), 3).code, Code::Aborted);
    }
}
