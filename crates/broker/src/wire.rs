//! The wire form of what daemons say to each other, and the bounds that a message must keep.

use kvferry_control::{Fault, MAX_METADATA, MAX_TRANSFER_ID, TransferId};
use kvferry_handshake::limits::MAX_RANKS;
use kvferry_handshake::{Mismatch, Verdict, WireError, decode, encode};

use crate::cause::{Cause, MAX_STANDING};
use crate::faults::{self, MAX_MESSAGE, MAX_MISMATCHES};
use crate::peer::{Body, EngineId, FetchState, PartState, PeerMessage, SiblingFailure};
use crate::source::{MAX_ADDRESS, MAX_ENGINE};

/// Most differences of one verdict.
const MAX_DIFFERENCES: usize = 16 << 10;

/// A field that is longer than any honest daemon makes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} has {len} entries or bytes, where {most} are the most")]
pub struct OutOfBounds {
    /// The field.
    pub field: &'static str,
    /// Its length.
    pub len: usize,
    /// The longest allowed.
    pub most: usize,
}

/// Page-list entries that are written in no time.
const SHORT_LISTS: usize = 4096;

type Bounds = Result<(), OutOfBounds>;

fn within(field: &'static str, len: usize, most: usize) -> Bounds {
    if len > most {
        return Err(OutOfBounds { field, len, most });
    }
    Ok(())
}

impl PeerMessage {
    /// The message's bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WireError> {
        encode(self)
    }

    /// About how many bytes it takes, where that may be many: whoever has little time leaves writing it to another.
    pub fn long(&self) -> Option<usize> {
        let envelope = match &self.body {
            Body::Join { envelope, .. } | Body::LinkOffer { envelope, .. } => Some(envelope),
            Body::LinkOpen { envelope, .. } => envelope.as_ref(),
            Body::LinkAnswer(answer) => answer.envelope.as_ref(),
            Body::Announce(announce) => {
                let entries: usize = announce.pages.groups.iter().map(Vec::len).sum();
                return (entries > SHORT_LISTS).then_some(entries * size_of::<u32>());
            }
            _ => None,
        };
        envelope.map(|envelope| {
            let placements = envelope.ranks.iter().flat_map(|rank| &rank.placements);
            placements
                .map(|placement| 100 + 4 * placement.layers.len() + 2 * placement.parts.len())
                .sum()
        })
    }

    /// The message that `bytes` are, all of them, within its bounds. Page lists and envelopes are checked by
    /// whoever uses them.
    pub fn from_bytes(bytes: &[u8]) -> Result<PeerMessage, WireError> {
        let message: PeerMessage = decode(bytes)?;
        message.check_bounds().map_err(|beyond| WireError::Malformed {
            len: bytes.len(),
            cause: beyond.to_string(),
        })?;
        Ok(message)
    }

    /// Whether every list and every text is within its bounds. The broker drops what is not.
    pub fn check_bounds(&self) -> Result<(), OutOfBounds> {
        match &self.body {
            Body::Join { .. } | Body::AskFetch { .. } => Ok(()),
            Body::Joined { engine, .. } | Body::Keep { engine, .. } | Body::SeatLost { engine, .. } => {
                check_engine(engine)
            }
            Body::JoinRefused { cause, .. } => check_fault(cause),
            Body::Leave { name, .. } => check_name(name),
            Body::Detach { engine, cause } => check_engine(engine).and_then(|()| check_fault(cause)),
            Body::Failed(failure) | Body::SiblingFailed(failure) => check_failure(failure),
            Body::Hint {
                home,
                name,
                transfer,
                by,
                ..
            } => within("home", home.len(), MAX_ADDRESS)
                .and_then(|()| check_name(name))
                .and_then(|()| check_transfer(transfer))
                .and_then(|()| check_engine(by)),
            Body::Expect {
                name, transfer, by, ..
            } => check_name(name)
                .and_then(|()| check_transfer(transfer))
                .and_then(|()| check_engine(by)),
            Body::Expected {
                engine, transfer, by, ..
            } => check_engine(engine)
                .and_then(|()| check_transfer(transfer))
                .and_then(|()| check_engine(by)),
            Body::LinkOpen {
                name, decode, known, ..
            } => check_name(name)
                .and_then(|()| check_engine(decode))
                .and_then(|()| known.as_ref().map_or(Ok(()), check_engine)),
            Body::NoLink { name, decode, cause } => check_name(name)
                .and_then(|()| check_engine(decode))
                .and_then(|()| check_fault(cause)),
            Body::LinkNeedsEnvelope { name, decode } => check_name(name).and_then(|()| check_engine(decode)),
            Body::LinkAnswer(answer) => {
                within("seats", answer.seats.len(), MAX_RANKS)?;
                for seat in answer.seats.iter().flatten() {
                    within("seat address", seat.address.len(), MAX_ADDRESS)?;
                }
                check_engine(&answer.decode)?;
                check_engine(&answer.engine)?;
                check_verdict(&answer.verdict)
            }
            Body::LinkOffer { engine, decode, .. } => {
                check_engine(engine).and_then(|()| check_engine(decode))
            }
            Body::LinkFailed {
                engine,
                decode,
                verdict,
            } => check_engine(engine)
                .and_then(|()| check_engine(decode))
                .and_then(|()| check_verdict(verdict)),
            Body::Announce(announce) => {
                within("offers", announce.offers.len(), MAX_RANKS)?;
                check_engine(&announce.engine)?;
                check_engine(&announce.decode)?;
                check_transfer(&announce.transfer)
            }
            Body::Ask { ranks, .. } => within("ranks", ranks.len(), MAX_RANKS),
            Body::PartState { state, .. } => match state {
                PartState::Final { metadata, .. } => {
                    within("metadata", metadata.as_ref().map_or(0, Vec::len), MAX_METADATA)
                }
                PartState::Failed(cause) => check_cause(cause),
                _ => Ok(()),
            },
            Body::FetchState { state, .. } => match state {
                FetchState::Failed(cause) => check_cause(cause),
                _ => Ok(()),
            },
        }
    }
}

impl Body {
    /// Shortens what this side says to what the other accepts.
    pub(crate) fn clamp(&mut self) {
        match self {
            Body::JoinRefused { cause, .. } | Body::Detach { cause, .. } | Body::NoLink { cause, .. } => {
                faults::clamp(cause);
            }
            Body::Failed(SiblingFailure { cause, .. })
            | Body::SiblingFailed(SiblingFailure { cause, .. })
            | Body::PartState {
                state: PartState::Failed(cause),
                ..
            }
            | Body::FetchState {
                state: FetchState::Failed(cause),
                ..
            } => cause.clamp(),
            Body::LinkAnswer(answer) => clamp_verdict(&mut answer.verdict),
            Body::LinkFailed { verdict, .. } => clamp_verdict(verdict),
            _ => {}
        }
    }
}

fn clamp_verdict(verdict: &mut Verdict) {
    for list in [
        &mut verdict.mismatches,
        &mut verdict.bridged,
        &mut verdict.warnings,
    ] {
        list.truncate(MAX_DIFFERENCES);
        list.iter_mut().for_each(faults::clamp_mismatch);
    }
}

fn check_name(name: &str) -> Bounds {
    within("engine name", name.len(), MAX_ENGINE)
}

fn check_engine(engine: &EngineId) -> Bounds {
    within("home", engine.home.len(), MAX_ADDRESS)?;
    check_name(&engine.name)
}

fn check_transfer(transfer: &TransferId) -> Bounds {
    within("transfer id", transfer.id.len(), MAX_TRANSFER_ID)
}

fn check_fault(cause: &Fault) -> Bounds {
    within("cause", cause.message.len(), MAX_MESSAGE)?;
    within("mismatches", cause.mismatches.len(), MAX_MISMATCHES)?;
    cause.mismatches.iter().try_for_each(check_mismatch)
}

fn check_mismatch(mismatch: &Mismatch) -> Bounds {
    for text in [
        &mismatch.field,
        &mismatch.prefill,
        &mismatch.decode,
        &mismatch.why,
        &mismatch.fix,
    ] {
        within("mismatch", text.len(), MAX_MESSAGE)?;
    }
    Ok(())
}

fn check_verdict(verdict: &Verdict) -> Bounds {
    for list in [&verdict.mismatches, &verdict.bridged, &verdict.warnings] {
        within("verdict", list.len(), MAX_DIFFERENCES)?;
        list.iter().try_for_each(check_mismatch)?;
    }
    Ok(())
}

fn check_failure(failure: &SiblingFailure) -> Bounds {
    check_engine(&failure.engine)?;
    check_transfer(&failure.transfer)?;
    check_cause(&failure.cause)
}

fn check_cause(cause: &Cause) -> Bounds {
    check_fault(&cause.first)?;
    let Some(arose) = &cause.arose else {
        return Ok(());
    };
    check_name(&arose.at.engine)?;
    within("daemon", arose.at.daemon.len(), MAX_ADDRESS)?;
    let Some(standing) = &arose.standing else {
        return Ok(());
    };
    for text in [&standing.phase, &standing.peer, &standing.trouble] {
        within("standing", text.len(), MAX_STANDING)?;
    }
    Ok(())
}
