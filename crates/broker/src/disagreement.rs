//! Names the first field in which two envelopes of one engine differ.

use std::fmt::Debug;

use kvferry_handshake::Envelope;

/// The field and both values, shortened.
pub(crate) fn first_difference(ours: &Envelope, theirs: &Envelope) -> String {
    identity(ours, theirs)
        .or_else(|| list("page_group", &ours.page_groups, &theirs.page_groups))
        .or_else(|| list("component", &ours.components, &theirs.components))
        .or_else(|| ranks(ours, theirs))
        .unwrap_or_else(|| "they are equal".to_owned())
}

fn field<T: PartialEq + Debug>(name: &str, ours: &T, theirs: &T) -> Option<String> {
    (ours != theirs).then(|| format!("{name}: {} against {}", short(ours), short(theirs)))
}

fn short(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    match text.char_indices().nth(300) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

fn identity(ours: &Envelope, theirs: &Envelope) -> Option<String> {
    let (a, b) = (&ours.identity, &theirs.identity);
    field("identity.role", &a.role, &b.role)
        .or_else(|| field("identity.incarnation", &a.incarnation, &b.incarnation))
        .or_else(|| field("identity.model", &a.model, &b.model))
        .or_else(|| field("identity.revision", &a.revision, &b.revision))
        .or_else(|| field("identity.weights_digest", &a.weights_digest, &b.weights_digest))
        .or_else(|| field("identity.config_digest", &a.config_digest, &b.config_digest))
        .or_else(|| field("identity.framework", &a.framework, &b.framework))
        .or_else(|| {
            field(
                "identity.framework_version",
                &a.framework_version,
                &b.framework_version,
            )
        })
        .or_else(|| {
            field(
                "identity.prefill_context_parallel",
                &a.prefill_context_parallel,
                &b.prefill_context_parallel,
            )
        })
        // Whatever the identity holds besides.
        .or_else(|| field("identity", a, b))
}

fn list<T: PartialEq + Debug>(name: &str, ours: &[T], theirs: &[T]) -> Option<String> {
    field(&format!("number of {name}s"), &ours.len(), &theirs.len()).or_else(|| {
        let pairs = ours.iter().zip(theirs).enumerate();
        pairs
            .into_iter()
            .find_map(|(at, (a, b))| field(&format!("{name}.{at}"), a, b))
    })
}

fn ranks(ours: &Envelope, theirs: &Envelope) -> Option<String> {
    field("number of ranks", &ours.ranks.len(), &theirs.ranks.len()).or_else(|| {
        ours.ranks.iter().zip(&theirs.ranks).find_map(|(a, b)| {
            let rank = a.rank;
            field("rank", &a.rank, &b.rank)
                .or_else(|| field(&format!("rank.{rank}.dcp_rank"), &a.dcp_rank, &b.dcp_rank))
                .or_else(|| list(&format!("rank.{rank}.placement"), &a.placements, &b.placements))
        })
    })
}
