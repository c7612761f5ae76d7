//! Envelopes and page lists as no validation would let them pass.

use kvferry_handshake::{ABSENT, Envelope, PageLists};

use super::draw::Draw;

fn number(draw: &mut Draw) -> u32 {
    let near = draw.between(0, 20);
    draw.pick(&[0, 1, 2, near, 64, 1000, 65_536, u32::MAX - 1, u32::MAX])
}

fn long_number(draw: &mut Draw) -> u64 {
    let near = draw.below(5000);
    draw.pick(&[0, 1, near, 1 << 31, 1 << 40, 1 << 62, u64::MAX / 2, u64::MAX])
}

/// Changes one field to something else.
pub(crate) fn envelope(draw: &mut Draw, envelope: &mut Envelope) {
    let any = |draw: &mut Draw, len: usize| draw.below(len as u64) as usize;
    let group = any(draw, envelope.page_groups.len());
    let component = any(draw, envelope.components.len());
    let rank = any(draw, envelope.ranks.len());
    let group = &mut envelope.page_groups[group];
    let component = &mut envelope.components[component];
    let part = any(draw, component.parts.len());
    let rank = &mut envelope.ranks[rank];
    match draw.below(9) {
        0 => group.page_size = number(draw),
        1 => group.pool_pages = number(draw),
        2 => component.dcp.size = number(draw).min(2000),
        3 => component.dcp.interleave = number(draw),
        4 => component.page_group = number(draw) as u16,
        5 => component.window = Some(number(draw)),
        6 => component.parts[part].heads = number(draw),
        7 => component.parts[part].width = number(draw),
        _ => rank.dcp_rank = number(draw),
    }
    if rank.placements.is_empty() || draw.once_in(3) {
        return;
    }
    let at = any(draw, rank.placements.len());
    let placement = &mut rank.placements[at];
    match draw.below(11) {
        0 => placement.component = number(draw) as u16,
        1 => placement.heads.first = number(draw),
        2 => placement.heads.count = number(draw),
        3 => placement.offset = long_number(draw),
        4 => placement.strides.page = long_number(draw),
        5 => placement.strides.token = long_number(draw),
        6 => placement.strides.head = long_number(draw),
        7 => placement.strides.part = long_number(draw),
        8 => placement.strides.layer = long_number(draw),
        9 => placement.parts.push(number(draw) as u16),
        _ => placement.layers.push(number(draw)),
    }
}

/// Changes some entries, or the length of a list.
pub(crate) fn lists(draw: &mut Draw, lists: &mut PageLists) {
    for list in &mut lists.groups {
        match draw.below(4) {
            0 => list.truncate(draw.below(3) as usize),
            1 => list.push(number(draw)),
            _ => {}
        }
        for id in list {
            if draw.once_in(8) {
                *id = draw.pick(&[ABSENT, 0, ABSENT - 1, *id]);
            }
        }
    }
    if draw.once_in(8) {
        lists.groups.pop();
    }
}
