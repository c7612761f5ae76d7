//! What the planner relies on in an envelope. Validation refuses such envelopes by field before they come
//! here; the planner checks again, because it computes addresses from them.

use kvferry_handshake::{Code, Component, Envelope, Mismatch, PageGroup, Placement};

use crate::mismatch;
use crate::stream::Both;

pub(crate) fn check(envelopes: Both<&Envelope>) -> Result<(), Vec<Mismatch>> {
    let mut mismatches = Vec::new();
    for (envelope, side) in envelopes.into_iter().zip(["prefill", "decode"]) {
        if let Err(what) = check_envelope(envelope) {
            mismatches.push(mismatch::new(
                Code::EnvelopeInvalid,
                format!("{side} envelope"),
                ["", ""].map(str::to_owned),
                what,
            ));
        }
    }
    if mismatches.is_empty() {
        Ok(())
    } else {
        Err(mismatches)
    }
}

fn check_envelope(envelope: &Envelope) -> Result<(), String> {
    for component in &envelope.components {
        check_component(envelope, component)
            .map_err(|what| format!("component {:?}: {what}", component.name))?;
    }
    for (number, rank) in (0u32..).zip(&envelope.ranks) {
        if rank.rank != number {
            return Err(format!("rank {} is listed at place {number}", rank.rank));
        }
        for placement in &rank.placements {
            let component = envelope.components.get(usize::from(placement.component));
            let group = component.and_then(|c| envelope.page_groups.get(usize::from(c.page_group)));
            let (Some(component), Some(group)) = (component, group) else {
                return Err(format!("rank {number} places a component that is not listed"));
            };
            check_placement(component, group, placement)
                .map_err(|what| format!("rank {number}, component {:?}: {what}", component.name))?;
        }
    }
    Ok(())
}

fn check_component(envelope: &Envelope, component: &Component) -> Result<(), String> {
    let Some(group) = envelope.page_groups.get(usize::from(component.page_group)) else {
        return Err("its page group is not listed".to_owned());
    };
    if group.page_size == 0 {
        return Err("its pages hold no tokens".to_owned());
    }
    let dcp = component.dcp;
    if dcp.size == 0 || dcp.interleave == 0 {
        return Err("a DCP size or interleave of 0".to_owned());
    }
    if dcp.size > 1 && group.page_size % dcp.interleave != 0 {
        return Err(format!(
            "interleave {} does not divide the page size {}",
            dcp.interleave, group.page_size
        ));
    }
    let bits = u64::from(component.element.bits());
    for part in &component.parts {
        let row = u64::from(part.width) * bits;
        if row == 0 || row % 8 != 0 {
            return Err(format!("a row of part {:?} is {row} bits long", part.name));
        }
    }
    Ok(())
}

fn check_placement(component: &Component, group: &PageGroup, placement: &Placement) -> Result<(), String> {
    let mut row = 0;
    for part in &placement.parts {
        let Some(part_of) = component.parts.get(usize::from(*part)) else {
            return Err(format!("part {part} is not listed"));
        };
        let end = placement.heads.first.checked_add(placement.heads.count);
        if placement.heads.count == 0 || end.is_none_or(|end| end > part_of.heads) {
            return Err(format!(
                "heads {} and {} more, but part {:?} has {}",
                placement.heads.first, placement.heads.count, part_of.name, part_of.heads
            ));
        }
        row = row.max(component.row_bytes(*part));
    }
    let tokens = match component.unit {
        kvferry_handshake::Unit::Token => u64::from(group.page_size),
        kvferry_handshake::Unit::Page | kvferry_handshake::Unit::Slot => 1,
    };
    let strides = &placement.strides;
    let last = [
        (u64::from(group.pool_pages), strides.page),
        (tokens, strides.token),
        (u64::from(placement.heads.count), strides.head),
        (placement.parts.len() as u64, strides.part),
        (placement.layers.len() as u64, strides.layer),
    ]
    .into_iter()
    .try_fold(placement.offset, |at, (count, stride)| {
        at.checked_add(count.saturating_sub(1).checked_mul(stride)?)
    });
    match last.and_then(|last| last.checked_add(row)) {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => Err("its last row ends beyond 63 bits".to_owned()),
    }
}
