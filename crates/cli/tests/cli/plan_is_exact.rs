//! What `kvferry plan` prints, verified by a program that knows only the envelope and docs/plan.md.

use std::collections::{BTreeMap, HashMap};

use crate::program::{Programs, page_lists};
use kvferry_handshake::{Cached, Dcp, Element, Envelope, Kind, Launch, ModelShape, Order, Role, Unit};
use serde_json::Value;

/// What a row is: component, layer, part, token (or slot), head.
type Identity = (String, u32, String, u64, u32);
/// Where a row lies: region and offset. With it: its length and identity.
type Map = BTreeMap<(u64, u64), (u64, Identity)>;

/// Every row of the listed pages of a rank, and whether a fetch of `from..to` wants it.
fn rows(
    envelope: &Envelope,
    rank: u32,
    lists: &[Vec<u32>],
    from: u64,
    to: u64,
) -> (Map, HashMap<Identity, u64>) {
    let (mut map, mut wanted) = (Map::new(), HashMap::new());
    let rank = &envelope.ranks[rank as usize];
    for placement in &rank.placements {
        let component = &envelope.components[usize::from(placement.component)];
        let group = usize::from(component.page_group);
        let page_size = u64::from(envelope.page_groups[group].page_size);
        let in_page = if component.unit == Unit::Token {
            page_size
        } else {
            1
        };
        let dcp_rank = if component.dcp.size > 1 { rank.dcp_rank } else { 0 };
        for (entry, page) in (0u64..).zip(&lists[group]).filter(|(_, page)| **page != u32::MAX) {
            for position in 0..in_page {
                // By the definition in docs/envelope.md, the token of a local index.
                let global = |local: u64| {
                    (0..)
                        .filter(|token| owner(component.dcp, *token) == dcp_rank)
                        .nth(local as usize)
                        .unwrap()
                };
                // The tokens that the row holds: one, a whole page's, or, of a state, its slot.
                let tokens: Vec<u64> = match component.unit {
                    Unit::Token => vec![global(entry * page_size + position)],
                    Unit::Page => (0..page_size)
                        .map(|of_page| global(entry * page_size + of_page))
                        .collect(),
                    Unit::Slot => vec![entry],
                };
                let token = tokens[0];
                let first = if component.kind == Kind::Window {
                    from.max(to.saturating_sub(component.window.unwrap().into()))
                } else {
                    from
                };
                let is_wanted =
                    component.unit == Unit::Slot || tokens.iter().any(|token| (first..to).contains(token));
                for (l, layer) in (0u64..).zip(&placement.layers) {
                    for (p, part) in (0u64..).zip(&placement.parts) {
                        for h in 0..placement.heads.count {
                            let s = &placement.strides;
                            let offset = placement.offset
                                + u64::from(*page) * s.page
                                + position * s.token
                                + u64::from(h) * s.head
                                + p * s.part
                                + l * s.layer;
                            let part = &component.parts[usize::from(*part)];
                            let len = u64::from(part.width) * u64::from(component.element.bits()) / 8;
                            let head = placement.heads.first + h;
                            let identity = (component.name.clone(), *layer, part.name.clone(), token, head);
                            if is_wanted {
                                wanted.insert(identity.clone(), len);
                            }
                            map.insert((placement.region.into(), offset), (len, identity));
                        }
                    }
                }
            }
        }
    }
    (map, wanted)
}

fn owner(dcp: Dcp, token: u64) -> u32 {
    u32::try_from(token / u64::from(dcp.interleave) % u64::from(dcp.size)).unwrap()
}

/// The row that holds this byte, the byte's place in it, and how many bytes of the row follow.
fn row_at(map: &Map, region: u64, offset: u64) -> (&Identity, u64, u64) {
    let ((found, start), (len, identity)) = map
        .range(..=(region, offset))
        .next_back()
        .unwrap_or_else(|| panic!("no row at {region}:{offset}"));
    assert!(
        *found == region && offset < start + len,
        "{region}:{offset} lies in no row of a listed page"
    );
    (identity, offset - start, start + len - offset)
}

/// Runs `kvferry plan` and proves that its moves write every wanted byte once, from the right place, and no other byte.
fn verify(prefill: &Envelope, decode: &Envelope, policy: &str, from: u64, to: u64) -> usize {
    verify_as(prefill, decode, decode, policy, from, to)
}

/// The same, but verifies against the map that `believed` states.
fn verify_as(
    prefill: &Envelope,
    decode: &Envelope,
    believed: &Envelope,
    policy: &str,
    from: u64,
    to: u64,
) -> usize {
    let programs = Programs::new(prefill, decode);
    let mut moves = 0;
    for rank in 0..decode.ranks.len() as u32 {
        let decode_lists = page_lists(decode, rank, to, 5);
        let prefill_lists: Vec<_> = (0..prefill.ranks.len() as u32)
            .map(|rank| page_lists(prefill, rank, to, 7))
            .collect();
        let output = programs.plan(policy, rank, from, to, &prefill_lists, &decode_lists);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );

        let (target, wanted) = rows(believed, rank, &decode_lists, from, to);
        let sources: Vec<Map> = (0u32..)
            .zip(&prefill_lists)
            .map(|(rank, lists)| rows(prefill, rank, lists, 0, to).0)
            .collect();
        let mut written: HashMap<Identity, Vec<(u64, u64)>> = HashMap::new();
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let one: Value = serde_json::from_str(line).unwrap();
            let number = |key: &str| one[key].as_u64().unwrap_or_else(|| panic!("{key} in {line}"));
            let source = &sources[number("source_rank") as usize];
            let (mut done, length) = (0, number("length"));
            assert!(length > 0, "{line}");
            while done < length {
                let (have, have_at, have_left) =
                    row_at(source, number("source_region"), number("source_offset") + done);
                let (want, want_at, want_left) = row_at(&target, number("region"), number("offset") + done);
                assert_eq!((have, have_at), (want, want_at), "{line}");
                let piece = have_left.min(want_left).min(length - done);
                written.entry(want.clone()).or_default().push((want_at, piece));
                done += piece;
            }
            moves += 1;
        }
        assert_eq!(
            written.len(),
            wanted.len(),
            "rank {rank} of {from}..{to}: rows written and wanted"
        );
        for (identity, pieces) in &mut written {
            pieces.sort_unstable();
            let mut at = 0;
            for (start, len) in pieces.iter() {
                assert_eq!(*start, at, "{identity:?} is written twice or in part");
                at += len;
            }
            assert_eq!(Some(&at), wanted.get(identity), "{identity:?}");
        }
    }
    moves
}

fn pair(shape: &ModelShape, prefill: Launch, decode: Launch) -> (Envelope, Envelope) {
    let prefill = Launch {
        role: Role::Prefill,
        engine: "p".into(),
        ..prefill
    };
    let decode = Launch {
        role: Role::Decode,
        engine: "d".into(),
        ..decode
    };
    (prefill.envelope(shape).unwrap(), decode.envelope(shape).unwrap())
}

fn small() -> Launch {
    Launch {
        page_size: 4,
        pool_pages: 40,
        slots: 4,
        ..Launch::default()
    }
}

#[test]
fn heads_split_otherwise_at_every_length_and_prefix() {
    let shape = ModelShape::new("m", 3).kv_widths(0..3, 4, 12, 8);
    let (prefill, decode) = pair(&shape, Launch { tp: 4, ..small() }, Launch { tp: 2, ..small() });
    for to in [1, 3, 4, 5, 19] {
        for from in [0, 4, to - 1, to] {
            if from <= to {
                verify(&prefill, &decode, "strict", from, to);
            }
        }
    }
}

#[test]
fn bridged_page_sizes_and_orders() {
    let shape = ModelShape::new("m", 2).kv(0..2, 2, 8);
    let prefill = Launch {
        tp: 2,
        page_size: 8,
        order: Order::Hnd,
        ..small()
    };
    let (prefill, decode) = pair(
        &shape,
        prefill,
        Launch {
            page_size: 1,
            ..small()
        },
    );
    for (from, to) in [(0, 1), (3, 21), (8, 16)] {
        verify(&prefill, &decode, "bridge", from, to);
    }
}

#[test]
fn latent_to_context_parallel_ranks() {
    let shape = ModelShape::new("m", 2).latent(0..2, 9);
    let dcp = Dcp {
        size: 4,
        interleave: 2,
    };
    let (prefill, decode) = pair(
        &shape,
        Launch { tp: 2, ..small() },
        Launch {
            tp: 4,
            dcp,
            ..small()
        },
    );
    for (from, to) in [(0, 1), (0, 37), (9, 37)] {
        verify(&prefill, &decode, "strict", from, to);
    }
}

#[test]
fn windows_and_state_beside_full_attention() {
    let shape = ModelShape::new("m", 3).kv([0], 2, 8).window([1], 2, 8, 10).state(
        "state",
        [2],
        &[("x", 4, 6), ("b", 2, 3)],
        Element::Fp32,
    );
    let (prefill, decode) = pair(&shape, Launch { tp: 2, ..small() }, small());
    for (from, to) in [(0, 5), (0, 23), (16, 23), (23, 23)] {
        let moves = verify(&prefill, &decode, "strict", from, to);
        assert!(moves > 0, "state moves even when every token is held");
    }
}

/// Whole pages: opaque ones, and those with one row a page. A page is wanted that holds a token asked for; a fetch that
/// begins inside one is refused.
#[test]
fn whole_pages() {
    let shape = ModelShape::new("m", 2).kv(0..2, 4, 8).with(
        Cached::new("scales", Kind::Scales, 0..2, &[("k", 4, 1)])
            .element(Element::Fp32)
            .per_page(),
    );
    let (prefill, decode) = pair(&shape, Launch { tp: 4, ..small() }, Launch { tp: 2, ..small() });
    let tiles = Cached::new("tiles", Kind::Kv, 0..2, &[("kv", 2, 48)]).opaque("amx");
    let tiles = ModelShape::new("m", 2).with(tiles);
    let opaque = pair(&tiles, Launch { tp: 2, ..small() }, small());
    let dcp = Launch {
        tp: 2,
        dcp: Dcp {
            size: 2,
            interleave: 2,
        },
        ..small()
    };
    let row = Cached::new("rows", Kind::Latent, 0..1, &[("latent", 1, 40)]).per_page();
    let split = pair(&ModelShape::new("m", 1).with(row), dcp.clone(), dcp);
    for (prefill, decode) in [(prefill, decode), opaque, split] {
        for (from, to) in [(0, 1), (0, 4), (0, 5), (8, 9), (8, 21)] {
            let moves = verify(&prefill, &decode, "strict", from, to);
            assert!(moves > 0, "{from}..{to}");
        }
    }
}

/// The verification bites: a plan for one map does not pass for another.
#[test]
#[should_panic(expected = "left == right")]
fn a_plan_for_another_order_does_not_pass() {
    let shape = ModelShape::new("m", 1).kv(0..1, 2, 8);
    let (prefill, decode) = pair(&shape, small(), small());
    let (_, other) = pair(
        &shape,
        small(),
        Launch {
            order: Order::Hnd,
            ..small()
        },
    );
    verify_as(&prefill, &decode, &other, "strict", 0, 4);
}
