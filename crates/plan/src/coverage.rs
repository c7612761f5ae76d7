//! The proof that the streams cover what the decode ranks own, each row exactly once.
//!
//! It starts anew from the envelopes and trusts nothing of how the streams came about. The source's DCP
//! ranks split the tokens, so it is enough that, for every decode rank, layer, part and DCP rank of the
//! source that has tokens in common with it, the heads of the streams tile the heads that it owns.

use kvferry_handshake::{HeadSpan, Mismatch};

use crate::link::Pair;
use crate::mismatch;
use crate::stream::{SOURCE, Stream, TARGET};
use crate::tokens::Share;

/// Rows of one decode rank: (component, decode rank, layer, part, DCP rank of the source).
type Key = (u16, u32, u32, u16, u32);

/// Proves it, or says what is wrong. A failure is a defect of the planner, or an envelope that places a row twice.
pub(crate) fn prove(pairs: &[Pair<'_>], streams: &[Stream]) -> Result<(), Vec<Mismatch>> {
    let carried = carried(streams);
    let owned = owned(pairs, carried.len()).ok_or_else(|| {
        vec![mismatch::internal(
            "the plan carries less than the decode side owns",
        )]
    })?;
    let owned = merge(owned).map_err(|key| vec![twice("the envelope places", key)])?;
    let carried = merge(carried).map_err(|key| vec![twice("the plan carries", key)])?;
    if owned != carried {
        let first = owned
            .iter()
            .zip(&carried)
            .find(|(a, b)| a != b)
            .map(|(a, b)| format!("owned {a:?}, carried {b:?}"));
        let what = first.unwrap_or_else(|| format!("{} owned, {} carried", owned.len(), carried.len()));
        return Err(vec![mismatch::internal(&format!(
            "rows owned and rows carried differ: {what}"
        ))]);
    }
    held(pairs, streams)
}

fn twice(who: &str, (component, rank, layer, part, class): Key) -> Mismatch {
    mismatch::internal(&format!(
        "{who} a row twice: component {component}, decode rank {rank}, layer {layer}, part {part}, \
         source DCP rank {class}"
    ))
}

/// What the decode ranks own; `None` where that is more than `most` spans, for each is carried by a stream or more.
fn owned(pairs: &[Pair<'_>], most: usize) -> Option<Vec<(Key, HeadSpan)>> {
    let mut rows = Vec::new();
    for pair in pairs {
        for rank in &pair.envelopes[TARGET].ranks {
            let wanted = pair.share(TARGET, rank.rank);
            let dcp = pair.dcp(SOURCE);
            let classes: Vec<u32> = (0..dcp.size)
                .filter(|class| Share::new(dcp, *class).meets(&wanted))
                .collect();
            for placement in rank.placements.iter().filter(|p| p.component == pair.at[TARGET]) {
                for layer in &placement.layers {
                    for part in &placement.parts {
                        rows.extend(classes.iter().map(|class| {
                            let key = (pair.at[TARGET], rank.rank, *layer, *part, *class);
                            (key, placement.heads)
                        }));
                    }
                    if rows.len() > most {
                        return None;
                    }
                }
            }
        }
    }
    Some(rows)
}

/// What the streams carry.
fn carried(streams: &[Stream]) -> Vec<(Key, HeadSpan)> {
    let mut rows = Vec::new();
    for stream in streams {
        let class = stream.tokens.source.rank;
        for base in &stream.layers {
            rows.extend(stream.parts.iter().map(|part| {
                let key = (stream.component, stream.decode_rank, base.layer, *part, class);
                (key, stream.heads)
            }));
        }
    }
    rows
}

/// Sorts, and joins heads that touch. Fails where heads lie over each other.
fn merge(mut rows: Vec<(Key, HeadSpan)>) -> Result<Vec<(Key, HeadSpan)>, Key> {
    rows.sort_unstable();
    let mut merged: Vec<(Key, HeadSpan)> = Vec::with_capacity(rows.len());
    for (key, heads) in rows {
        match merged.last_mut() {
            Some((last, before)) if *last == key && before.end() >= heads.first => {
                if before.end() > heads.first {
                    return Err(key);
                }
                before.count += heads.count;
            }
            _ => merged.push((key, heads)),
        }
    }
    Ok(merged)
}

/// Whether every stream's source has what it is to send.
fn held(pairs: &[Pair<'_>], streams: &[Stream]) -> Result<(), Vec<Mismatch>> {
    let mut held = Vec::new();
    for pair in pairs {
        for rank in &pair.envelopes[SOURCE].ranks {
            let class = pair.share(SOURCE, rank.rank).rank;
            for placement in rank.placements.iter().filter(|p| p.component == pair.at[SOURCE]) {
                for part in &placement.parts {
                    let Some(part) = pair.parts.get(usize::from(*part)).copied().flatten() else {
                        continue;
                    };
                    held.extend(placement.layers.iter().map(|layer| {
                        let key: Key = (pair.at[TARGET], rank.rank, *layer, part, class);
                        (key, placement.heads)
                    }));
                }
            }
        }
    }
    held.sort_unstable();
    for stream in streams {
        let class = stream.tokens.source.rank;
        for base in &stream.layers {
            for part in &stream.parts {
                let key = (stream.component, stream.prefill_rank, base.layer, *part, class);
                let before =
                    held.partition_point(|(at, heads)| (*at, heads.first) <= (key, stream.heads.first));
                let found = before.checked_sub(1).and_then(|at| held.get(at));
                if found.is_none_or(|(at, heads)| *at != key || heads.end() < stream.heads.end()) {
                    return Err(vec![mismatch::internal(&format!(
                        "prefill rank {} does not hold what it is to send: {key:?}",
                        stream.prefill_rank
                    ))]);
                }
            }
        }
    }
    Ok(())
}
