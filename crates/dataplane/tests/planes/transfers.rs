//! Every byte goes where the plan says and nowhere else, by both paths.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::pair::{self, Engine, Pair, config, expected, geometry, next_job, transfers};
use kvferry_dataplane::{Config, RegionKey};
use kvferry_handshake::{Ready, TokenRange};
use kvferry_plan::ChunkMap;

type Regions = Vec<Arc<[(u16, RegionKey)]>>;

/// How a prompt becomes ready.
#[derive(Clone, Copy, Debug)]
enum Pace {
    AtOnce,
    ByTokens,
    ByLayers,
}

/// What is said to be ready, one after the other, of a prompt that ends at `end`.
fn steps(pace: Pace, end: u64, layers: u32) -> Vec<Ready> {
    let mut steps = Vec::new();
    match pace {
        Pace::AtOnce => {}
        Pace::ByTokens => steps.extend((1..4).map(|part| Ready {
            tokens: end * part / 4,
            ..Ready::default()
        })),
        Pace::ByLayers => steps.extend((1..=layers).map(|layer| Ready {
            front_tokens: end,
            front_layers: layer,
            ..Ready::default()
        })),
    }
    steps.push(Ready::complete(end));
    steps
}

struct Case {
    prefill: Engine,
    decode: Engine,
    maps: BTreeMap<(u32, u32), ChunkMap>,
    /// Where the prompt really ends.
    end: u64,
    pace: Pace,
}

impl Case {
    fn new(seed: u64) -> Case {
        let (prefill, decode, tokens) = geometry(seed);
        prefill.fill(seed ^ 3);
        decode.fill(seed ^ 4);
        let from = if seed.is_multiple_of(3) { tokens / 3 } else { 0 };
        let end = if seed.is_multiple_of(4) {
            from + (tokens - from) * 2 / 3
        } else {
            tokens
        };
        let maps = transfers(&prefill, &decode, TokenRange { from, to: tokens });
        Case {
            prefill,
            decode,
            maps,
            end,
            pace: [Pace::AtOnce, Pace::ByTokens, Pace::ByLayers][(seed % 7 % 3) as usize],
        }
    }

    fn layers(&self) -> u32 {
        self.prefill
            .envelope
            .components
            .iter()
            .flat_map(|c| &c.layers)
            .max()
            .unwrap()
            + 1
    }

    fn register(&self, pair: &Pair, local: bool) -> (Regions, Regions) {
        let source = self
            .prefill
            .ranks
            .iter()
            .map(|rank| rank.register(&pair.a.plane, rank.rank.into()));
        let plane = if local { &pair.a.plane } else { &pair.b.plane };
        let target = self
            .decode
            .ranks
            .iter()
            .map(|rank| rank.register(plane, 100 + u64::from(rank.rank)));
        (source.collect(), target.collect())
    }

    fn cut_maps(&self) -> BTreeMap<(u32, u32), ChunkMap> {
        self.maps
            .iter()
            .map(|(pair, map)| (*pair, map.cut(self.end)))
            .collect()
    }

    fn check(&self, before: &[BTreeMap<u16, Vec<u8>>], seed: u64) {
        let maps = self.cut_maps();
        for (rank, before) in self.decode.ranks.iter().zip(before) {
            let expected = expected(before, &self.prefill, rank.rank, &maps);
            for (region, bytes) in rank.bytes() {
                let wrong = bytes
                    .iter()
                    .zip(&expected[&region])
                    .position(|(is, due)| is != due);
                assert_eq!(
                    wrong, None,
                    "seed {seed}, rank {}, region {region}: first wrong byte",
                    rank.rank
                );
            }
        }
    }
}

fn release(pair: &Pair, sources: &Regions, targets: &Regions, local: bool) {
    let plane = if local { &pair.a.plane } else { &pair.b.plane };
    for regions in sources {
        regions.iter().for_each(|(_, key)| pair.a.plane.release(*key));
    }
    for regions in targets {
        regions.iter().for_each(|(_, key)| plane.release(*key));
    }
}

/// Carries a case by TCP.
fn over_tcp(pair: &Pair, seed: u64) {
    let case = Case::new(seed);
    let (sources, targets) = case.register(pair, false);
    let before: Vec<_> = case.decode.ranks.iter().map(|rank| rank.bytes()).collect();
    let mut jobs = Vec::new();
    for ((source, target), map) in &case.maps {
        let (send, receive) = (next_job(), next_job());
        jobs.push((send, receive, *source, *target));
        pair.b
            .plane
            .receive(receive, "a", map.clone(), Arc::clone(&targets[*target as usize]));
        pair.a.plane.send(
            send,
            "b",
            receive.0,
            map.clone(),
            Arc::clone(&case.prefill.ranks[*source as usize].pages),
            Arc::clone(&sources[*source as usize]),
        );
    }
    for ready in steps(case.pace, case.end, case.layers()) {
        for (send, ..) in &jobs {
            pair.a.plane.ready(*send, ready, None);
        }
    }
    for (_, receive, ..) in &jobs {
        pair.b.plane.end(*receive, case.end);
    }
    let maps = case.cut_maps();
    for (send, receive, source, target) in &jobs {
        pair.a.log.complete(*send);
        pair.b.log.complete(*receive);
        pair.a.plane.close(*send);
        pair.b.plane.close(*receive);
        let (sent, received) = (pair.a.log.closed(*send), pair.b.log.closed(*receive));
        let total = maps[&(*source, *target)].total_bytes();
        assert_eq!(
            (sent.closed[0].bytes, received.closed[0].bytes),
            (total, total),
            "seed {seed}"
        );
        assert_eq!((sent.closed.len(), received.closed.len()), (1, 1));
        assert_eq!(
            (sent.complete, received.complete, sent.late, received.late),
            (1, 1, 0, 0)
        );
    }
    case.check(&before, seed);
    release(pair, &sources, &targets, false);
}

/// Carries a case within the node.
fn within_node(pair: &Pair, seed: u64) {
    let case = Case::new(seed);
    let (sources, targets) = case.register(pair, true);
    let before: Vec<_> = case.decode.ranks.iter().map(|rank| rank.bytes()).collect();
    let mut jobs = Vec::new();
    for ((source, target), map) in &case.maps {
        let job = next_job();
        jobs.push((job, *source, *target));
        pair.a.plane.copy(
            job,
            map.clone(),
            Arc::clone(&case.prefill.ranks[*source as usize].pages),
            Arc::clone(&sources[*source as usize]),
            Arc::clone(&targets[*target as usize]),
        );
    }
    for ready in steps(case.pace, case.end, case.layers()) {
        for (job, ..) in &jobs {
            pair.a.plane.ready(*job, ready, None);
        }
    }
    let maps = case.cut_maps();
    for (job, source, target) in &jobs {
        pair.a.log.complete(*job);
        pair.a.plane.close(*job);
        let seen = pair.a.log.closed(*job);
        let map = &maps[&(*source, *target)];
        assert_eq!(seen.closed[0].bytes, map.total_bytes(), "seed {seed}");
        assert_eq!(seen.closed[0].bounced, 0);
        let pages = &case.prefill.ranks[*source as usize].pages;
        let moves: usize = (0..map.chunks())
            .map(|chunk| map.moves(chunk, pages).count())
            .sum();
        assert_eq!(seen.closed[0].moves, moves as u64, "seed {seed}");
    }
    case.check(&before, seed);
    release(pair, &sources, &targets, true);
}

#[test]
fn random_geometries_within_the_node() {
    let pair = Pair::new(config());
    for seed in 0..60 {
        within_node(&pair, seed);
    }
    assert_eq!(pair::count(&pair.a.plane.counts(), "regions"), 0);
    assert_eq!(pair::count(&pair.a.plane.counts(), "mapped_bytes"), 0);
}

#[test]
fn random_geometries_over_tcp() {
    let pair = Pair::new(config());
    for seed in 0..60 {
        over_tcp(&pair, seed);
    }
    let sent: u64 = pair.a.plane.traffic().iter().map(|peer| peer.sent_bytes).sum();
    let received: u64 = pair
        .b
        .plane
        .traffic()
        .iter()
        .map(|peer| peer.received_bytes)
        .sum();
    assert!(sent > 0);
    assert_eq!(sent, received);
}

#[test]
fn random_geometries_over_tcp_with_checksums() {
    let pair = Pair::new(Config {
        checksum: true,
        ..config()
    });
    for seed in 100..130 {
        over_tcp(&pair, seed);
    }
}
