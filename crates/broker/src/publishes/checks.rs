//! What a publish must keep.

use kvferry_control::{Fault, MAX_METADATA, Publish as PublishCall};
use kvferry_handshake::{ABSENT, Code, Envelope, PageLists, Ready};

use crate::faults;
use crate::ranks::Rank;

/// Most decode engines that one publish serves.
const MAX_SERVES: u32 = 1024;

pub(super) fn check_small(call: &PublishCall) -> Result<(), Fault> {
    let len = call.metadata.as_ref().map_or(0, Vec::len);
    if len > MAX_METADATA {
        return Err(Fault::new(
            Code::MetadataTooLong,
            format!("{len} bytes of metadata; at most {MAX_METADATA}"),
        ));
    }
    if call.serves == 0 || call.serves > MAX_SERVES {
        return Err(Fault::new(
            Code::ProtocolViolation,
            format!(
                "serves {}; a publish serves 1 to {MAX_SERVES} decode engines",
                call.serves
            ),
        ));
    }
    Ok(())
}

/// One way to say the same: a final one is ready throughout, and a front without layers is none.
pub(super) fn normal(ready: Ready) -> Result<Ready, Fault> {
    let wrong = |what: String| Err(Fault::new(Code::TokensInvalid, what));
    let front = if ready.front_layers == 0 {
        ready.tokens
    } else {
        ready.front_tokens
    };
    if front < ready.tokens {
        return wrong(format!(
            "front_tokens {front} are below tokens {}: the front layers are ready at least as far",
            ready.tokens
        ));
    }
    match ready.end {
        Some(end) if end < front => wrong(format!(
            "the end {end} is below the {front} tokens that are ready"
        )),
        Some(end) => Ok(Ready::complete(end)),
        None => Ok(Ready {
            front_tokens: front,
            ..ready
        }),
    }
}

/// What was ready stays ready.
pub(super) fn check_growth(old: &Ready, new: &Ready) -> Result<(), Fault> {
    let front_stays = new.tokens >= old.front_tokens
        || (new.front_tokens >= old.front_tokens && new.front_layers >= old.front_layers);
    if new.tokens < old.tokens || !front_stays {
        return Err(Fault::new(
            Code::TokensInvalid,
            format!("readiness shrinks: {} after {}", in_words(new), in_words(old)),
        ));
    }
    Ok(())
}

fn in_words(ready: &Ready) -> String {
    let Ready {
        tokens,
        front_tokens,
        front_layers,
        ..
    } = ready;
    format!("tokens {tokens}, and front_tokens {front_tokens} in the first {front_layers} layers")
}

pub(super) fn check_lists(rank: &Rank, lists: &PageLists, ready: &Ready) -> Result<(), Fault> {
    let tokens = ready.end.unwrap_or(ready.front_tokens);
    kvferry_plan::check_pages(&rank.envelope, rank.rank, lists, tokens, false).map_err(faults::from_plan)
}

/// Lists only grow; a window's pages may become absent.
pub(super) fn check_extends(envelope: &Envelope, old: &PageLists, new: &PageLists) -> Result<(), Fault> {
    for (group, old) in old.groups.iter().enumerate() {
        let empty = Vec::new();
        let new = new.groups.get(group).unwrap_or(&empty);
        let may_vanish = envelope
            .components
            .iter()
            .any(|component| usize::from(component.page_group) == group && component.window.is_some());
        let kept = |(old, new): (&u32, &u32)| old == new || (may_vanish && *new == ABSENT);
        if new.len() < old.len() || !old.iter().zip(new).all(kept) {
            return Err(Fault::new(
                Code::PagesInvalid,
                format!("page list {group} does not begin with what was published before"),
            ));
        }
    }
    Ok(())
}
