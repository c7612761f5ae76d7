//! How causes are worded and passed on: each names peer, phase and bytes done, and stays bounded.

use kvferry_control::Fault;
use kvferry_handshake::{Code, Mismatch};

/// Longest message in bytes; causes are passed from daemon to daemon and must not grow on the way.
pub(crate) const MAX_MESSAGE: usize = 2048;
/// Most mismatches that a cause carries.
pub(crate) const MAX_MISMATCHES: usize = 256;

pub(crate) fn shutting_down() -> Fault {
    Fault::new(Code::Shutdown, "the daemon is shutting down")
}

/// A planner's refusal.
pub(crate) fn from_plan(error: kvferry_plan::PlanError) -> Fault {
    Fault::new(error.code, error.message)
}

/// The same cause with more said about it.
pub(crate) fn with(cause: &Fault, more: &str) -> Fault {
    bounded(Fault {
        code: cause.code,
        message: format!("{} [{more}]", cause.message),
        mismatches: cause.mismatches.clone(),
    })
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
        return bounded(cause.clone());
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
    clamp_text(&mut cause.message);
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
        clamp_text(text);
    }
}

fn clamp_text(text: &mut String) {
    if text.len() > MAX_MESSAGE {
        let mut at = MAX_MESSAGE;
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
            cause = with(&from_peer(cause, "node:1"), "phase: moving");
        }
        assert!(cause.message.len() <= MAX_MESSAGE);
        assert!(cause.message.starts_with("node:1: "));
    }

    #[test]
    fn one_ranks_misfortune_is_not_its_siblings() {
        let gone = for_sibling(&Fault::new(Code::EngineGone, "closed"), 3);
        assert_eq!(gone.code, Code::SiblingFailed);
        assert!(gone.message.contains("rank 3") && gone.message.contains("engine_gone"));
        assert_eq!(for_sibling(&Fault::new(Code::Aborted, ""), 3).code, Code::Aborted);
    }
}
