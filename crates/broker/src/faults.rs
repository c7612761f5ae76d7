//! Faults that several parts make, and the bounds of those that are passed on.

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

/// What another daemon said, bounded.
pub(crate) fn from_peer(cause: Fault, who: &str) -> Fault {
    bounded(Fault {
        message: format!("{who}: {}", cause.message),
        ..cause
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

pub(crate) fn clamp_text(text: &mut String, most: usize) {
    if text.len() > most {
        let mut at = most;
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        text.truncate(at);
    }
}
