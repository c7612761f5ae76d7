//! Thousands of seeds: messages lost, doubled, delayed and overtaking, chunks lost, jobs failing and
//! stalling, ranks and daemons dying and coming back, channels cut, aborts, hints, attempts.
//!
//! The ledger and the data plane check as it happens; see there. What is checked at the end is here.

use std::collections::BTreeMap;

use kvferry_control::TransferId;
use kvferry_handshake::{Ready, Role};
use rand::Rng;

use crate::data::Troubles;
use crate::engines::tokens;
use crate::geometry::envelope;
use crate::ledger::Side;
use crate::sim::{Action, Cluster, DEADLINE, LEASE};

/// For how long things go wrong.
const HORIZON: u64 = 20_000_000;
/// What may pass between the last thing that happened to a transfer and its end: it may find its link,
/// wait for its publish and then wait for bytes, for a deadline each; or wait for a lease. Fences are on top.
const BOUND: u64 = 3 * DEADLINE + LEASE + 1_000_000;

#[derive(Debug)]
struct Script {
    transfer: TransferId,
    prefill: usize,
    decode: Vec<usize>,
    prompt: u64,
    held: u64,
    to: u64,
    least: u64,
    serves: u32,
    /// One engine may say that it will not fetch.
    declined: bool,
    /// Readiness of each publish, the last one final.
    steps: Vec<Ready>,
    /// How far each prefill rank is.
    at: BTreeMap<usize, usize>,
}

struct Storm {
    cluster: Cluster,
    scripts: Vec<Script>,
    wild: bool,
}

impl Storm {
    fn new(seed: u64) -> Storm {
        let mut cluster = Cluster::new(seed, 3);
        let wild = !seed.is_multiple_of(4);
        let rng = &mut cluster.rng;
        let nodes = rng.random_range(1..=3usize);
        let pick = |rng: &mut rand::rngs::SmallRng| {
            let tp = [1u32, 2, 4][rng.random_range(0..3)];
            let on: Vec<usize> = (0..tp).map(|_| rng.random_range(0..nodes)).collect();
            (tp, on)
        };
        let shapes: Vec<_> = (0..3).map(|_| pick(rng)).collect();
        let mismatched = rng.random_range(0..12) == 0;
        let (lost, twice) = (rng.random_range(0..25), rng.random_range(0..15));
        let delay = [50, 2_000, 100_000][rng.random_range(0..3)];
        let loops_too = rng.random_bool(0.3);
        let troubles = Troubles {
            lost: rng.random_range(0..20),
            failing: [0, 0, 3][rng.random_range(0..3)],
            stalled: [0, 0, 4][rng.random_range(0..3)],
            delay: [20, 1_000, 50_000][rng.random_range(0..3)],
        };
        let small = rng.random_range(0..10) == 0;
        let rdma = rng.random_range(0..25) == 0;
        cluster.ledger.forgetful = small;
        if small || rdma {
            for number in 0..3 {
                let mut config = cluster.node_config(number);
                config.require_rdma = rdma;
                if small {
                    config.max_transfers_per_rank = 3;
                    config.limits.announced_per_peer = 6;
                    config.limits.pages = 60;
                    config.limits.links = 1;
                    config.limits.ended = 4;
                }
                cluster.boot_with(number, config);
            }
        }
        if wild {
            cluster.net.lost = lost;
            cluster.net.twice = twice;
            cluster.net.delay = delay;
            cluster.net.loops_too = loops_too;
            cluster.troubles(troubles);
        }
        let names = ["p", "d", "e"];
        for (at, (tp, on)) in shapes.into_iter().enumerate() {
            let role = if at == 0 { Role::Prefill } else { Role::Decode };
            let mut envelope = envelope(names[at], role, tp, 1);
            if mismatched && at == 2 {
                envelope.identity.model = "another".to_owned();
            }
            let engine = cluster.engine(envelope, &on);
            // Now and then an engine comes so late that fetches give it up.
            let late = if cluster.rng.random_range(0..30) == 0 {
                HORIZON / 2
            } else {
                0
            };
            for rank in cluster.engines[engine].ranks.clone() {
                let delay = late + cluster.rng.random_range(1..1_500_000);
                cluster.act_later(delay, Action::Attach(rank));
                if cluster.rng.random_range(0..20) == 0 {
                    cluster.act_later(delay * 2, Action::Attach(rank));
                }
            }
        }
        let mut storm = Storm {
            cluster,
            scripts: Vec::new(),
            wild,
        };
        for number in 0..storm.cluster.rng.random_range(4..14) {
            storm.write_script(number);
        }
        if wild {
            storm.plan_disasters(nodes);
        }
        storm
    }

    fn write_script(&mut self, number: usize) {
        let script = self.scripts.len();
        let cluster = &mut self.cluster;
        let rng = &mut cluster.rng;
        let prompt = [1, 3, 4, 5, 17, 30][rng.random_range(0..6)];
        let held = rng.random_range(0..=prompt);
        let both = rng.random_range(0..5) == 0;
        let decode = match (both, rng.random_bool(0.7)) {
            (true, _) => vec![1, 2],
            (false, true) => vec![1],
            (false, false) => vec![2],
        };
        // Now and then the prompt turns out shorter, or longer, than the decode side was told.
        let to = match rng.random_range(0..8) {
            0 => prompt + rng.random_range(0..3),
            1 => prompt.max(2) - 1,
            _ => prompt,
        };
        let held = held.min(to);
        let least = if rng.random_bool(0.8) {
            held.max(to.min(prompt))
        } else {
            to
        };
        let mut steps = Vec::new();
        let mut ready = Ready::default();
        for _ in 0..rng.random_range(0..3) {
            ready.tokens = rng.random_range(ready.front_tokens..=prompt);
            ready.front_layers = rng.random_range(0..2);
            ready.front_tokens = rng.random_range(ready.tokens..=prompt);
            if ready.front_layers == 0 {
                ready.front_tokens = ready.tokens;
            }
            steps.push(ready);
        }
        steps.push(Ready::complete(prompt));
        // Now and then the same id again, in a higher attempt.
        let again = number > 0 && rng.random_range(0..5) == 0;
        let transfer = match self.scripts.last() {
            Some(last) if again => TransferId {
                id: last.transfer.id.clone(),
                attempt: last.transfer.attempt + 1,
            },
            _ => TransferId {
                id: format!("t{number}"),
                attempt: 0,
            },
        };
        let begin = rng.random_range(1_600_000..HORIZON - 4_000_000);
        let mut plan = Vec::new();
        for rank in cluster.engines[0].ranks.clone() {
            if rng.random_range(0..40) == 0 {
                continue;
            }
            let mut at = begin + rng.random_range(0..1_500_000);
            for _ in &steps {
                plan.push((at, Action::Step { rank, script }));
                at += rng.random_range(1..1_000_000);
            }
        }
        let fetched = begin + rng.random_range(0..2_000_000);
        for engine in &decode {
            for rank in cluster.engines[*engine].ranks.clone() {
                if rng.random_range(0..40) == 0 {
                    continue;
                }
                let at = fetched + rng.random_range(0..300_000);
                plan.push((at, Action::Fetch { rank, script }));
                if rng.random_range(0..30) == 0 {
                    plan.push((at + rng.random_range(0..500_000), Action::Fetch { rank, script }));
                }
            }
        }
        let wild = self.wild;
        let ranks = cluster.ranks.len();
        if wild && rng.random_range(0..6) == 0 {
            let rank = rng.random_range(0..ranks);
            let at = begin + rng.random_range(0..4_000_000);
            plan.push((at, Action::Abort { rank, script }));
        }
        let mut declined = false;
        if rng.random_range(0..6) == 0 {
            let decline = rng.random_range(0..3) == 0;
            declined = decline;
            let rank = cluster.engines[decode[0]].ranks[0];
            let at = begin + rng.random_range(0..2_000_000);
            plan.push((
                at,
                Action::Hint {
                    rank,
                    script,
                    decline,
                },
            ));
        }
        for (at, action) in plan {
            cluster.act_later(at, action);
        }
        self.scripts.push(Script {
            transfer,
            prefill: 0,
            serves: u32::try_from(decode.len()).unwrap(),
            decode,
            declined,
            prompt,
            held,
            to,
            least,
            steps,
            at: BTreeMap::new(),
        });
    }

    fn plan_disasters(&mut self, nodes: usize) {
        let cluster = &mut self.cluster;
        let ranks = cluster.ranks.len();
        for _ in 0..cluster.rng.random_range(0..5) {
            let at = cluster.rng.random_range(2_000_000..HORIZON);
            let action = match cluster.rng.random_range(0..12) {
                10 => Action::Disagree(cluster.rng.random_range(0..ranks)),
                11 => Action::Shutdown(cluster.rng.random_range(0..nodes)),
                0..4 => Action::Disconnect(cluster.rng.random_range(0..ranks)),
                4..6 => Action::Crash(cluster.rng.random_range(0..nodes)),
                6..8 => Action::Unregister(cluster.rng.random_range(0..ranks)),
                _ => {
                    let a = cluster.rng.random_range(0..nodes);
                    Action::Cut(a, (a + 1) % 3)
                }
            };
            cluster.act_later(at, action);
        }
    }

    fn run(&mut self, time: u64) {
        let until = self.cluster.now + time;
        let mut checked = self.cluster.now;
        while self.cluster.step(until) {
            for action in std::mem::take(&mut self.cluster.due) {
                self.perform(action);
            }
            self.come_back();
            if self.cluster.now > checked + 1_000_000 {
                checked = self.cluster.now;
                self.check_bound();
            }
        }
        self.cluster.now = until;
        self.check_bound();
    }

    /// Ranks that were refused or taken back attach again.
    fn come_back(&mut self) {
        for rank in std::mem::take(&mut self.cluster.unattached) {
            let delay = self.cluster.rng.random_range(100_000..600_000);
            self.cluster.act_later(delay, Action::Attach(rank));
        }
    }

    fn perform(&mut self, action: Action) {
        let cluster = &mut self.cluster;
        let up = |cluster: &Cluster, rank: usize| {
            cluster.nodes[cluster.ranks[rank].node].broker.is_some() && cluster.ranks[rank].attached
        };
        match action {
            Action::Attach(rank) => {
                let it = &cluster.ranks[rank];
                let asked = it
                    .calls
                    .values()
                    .any(|asked| matches!(asked, crate::engines::Asked::Attach));
                if cluster.nodes[it.node].broker.is_none() {
                    cluster.act_later(500_000, Action::Attach(rank));
                } else if !asked && (!it.attached || cluster.rng.random_bool(0.2)) {
                    // Now and then it is attached already, and refused.
                    cluster.attach(rank);
                }
            }
            Action::Step { rank, script } => {
                if !up(cluster, rank) || !cluster.is_ready(rank) {
                    return;
                }
                let script = &mut self.scripts[script];
                let at = script.at.entry(rank).or_default();
                let tag = (Side::Publish, script.transfer.clone());
                if *at > 0 && !cluster.ranks[rank].held.contains_key(&tag) {
                    return;
                }
                if let Some(ready) = script.steps.get(*at) {
                    *at += 1;
                    let metadata = (*at == script.steps.len()).then(|| vec![7; *at]);
                    let transfer = script.transfer.clone();
                    cluster.publish(rank, &transfer, script.prompt, *ready, script.serves, metadata);
                }
            }
            Action::Fetch { rank, script } => {
                let script = &self.scripts[script];
                if up(cluster, rank) && cluster.is_ready(rank) {
                    let range = tokens(script.held, script.to);
                    cluster.fetch(rank, script.prefill, &script.transfer, range, script.least);
                }
            }
            Action::Abort { rank, script } => {
                if up(cluster, rank) {
                    cluster.abort(rank, &self.scripts[script].transfer.clone());
                }
            }
            Action::Hint {
                rank,
                script,
                decline,
            } => {
                if up(cluster, rank) {
                    let transfer = self.scripts[script].transfer.clone();
                    cluster.hint(rank, 0, &transfer, decline);
                }
            }
            Action::Disconnect(rank) => {
                cluster.disconnect(rank);
                cluster.unattached.push(rank);
            }
            Action::Unregister(rank) => {
                if up(cluster, rank) && cluster.ranks[rank].regions.contains_key(&1) {
                    cluster.unregister(rank, 1);
                }
            }
            Action::Crash(node) => {
                cluster.crash(node);
                let delay = cluster.rng.random_range(1..3_000_000);
                cluster.act_later(delay, Action::Restart(node));
            }
            Action::Restart(node) => {
                if cluster.nodes[node].broker.is_none() {
                    cluster.boot(node);
                    for rank in 0..cluster.ranks.len() {
                        if cluster.ranks[rank].node == node {
                            cluster.unattached.push(rank);
                        }
                    }
                }
            }
            Action::Cut(a, b) => cluster.cut(a, b),
            Action::Disagree(rank) => {
                if !up(cluster, rank) {
                    return;
                }
                cluster.disconnect(rank);
                let mut other = cluster.engines[cluster.ranks[rank].engine].envelope.clone();
                if cluster.rng.random_bool(0.5) {
                    other.identity.framework_version = "2".to_owned();
                } else {
                    other.identity.incarnation += 1;
                }
                cluster.attach_as(rank, other);
            }
            Action::Shutdown(node) => {
                if cluster.nodes[node].broker.is_some() {
                    cluster.input(node, kvferry_broker::Input::Shutdown);
                    cluster.act_later(1_000_000, Action::Crash(node));
                }
            }
        }
    }

    /// Nothing is open for longer than it may be.
    fn check_bound(&self) {
        let now = self.cluster.now;
        for (key, at) in &self.cluster.ledger.open {
            let at = (*at).max(self.cluster.ledger.stirred(&key.2.1));
            assert!(at + BOUND > now, "{key:?} is open since {at}, it is {now}");
        }
    }

    /// Lets everything end, then takes everything away.
    fn wind_down(&mut self) {
        self.cluster.net.lost = 0;
        self.cluster.net.twice = 0;
        self.run(BOUND);
        let open = &self.cluster.ledger.open;
        assert!(open.is_empty(), "still open: {open:?}");
        self.check_ends();
        for node in 0..self.cluster.nodes.len() {
            if self.cluster.nodes[node].broker.is_none() {
                self.cluster.boot(node);
            }
        }
        for rank in 0..self.cluster.ranks.len() {
            self.cluster.disconnect(rank);
        }
        self.cluster.unattached.clear();
        self.cluster.run_for(60 * DEADLINE);
        for (number, node) in self.cluster.nodes.iter().enumerate() {
            let broker = node.broker.as_ref().expect("it is up");
            for (name, count) in broker.counts().into_iter().chain(broker.remembered()) {
                assert_eq!(count, 0, "{name} at node {number} after everything has gone");
            }
            assert!(broker.is_idle());
            assert!(node.data.is_idle(), "jobs are left open at node {number}");
            assert!(node.data.memory.is_empty(), "regions are left at node {number}");
        }
    }

    /// What both sides said of one transfer.
    fn check_ends(&self) {
        let records = &self.cluster.ledger.records;
        for script in &self.scripts {
            let tag = |side| (side, script.transfer.clone());
            for rank in &self.cluster.engines[script.prefill].ranks {
                let ends = records.get(&(*rank, tag(Side::Publish)));
                let delivered = ends.is_some_and(|ends| ends.contains(&None));
                if !delivered {
                    continue;
                }
                // A publisher is told `delivered` only when all that it serves have everything.
                let has = |rank: &usize| {
                    let ends = records.get(&(*rank, tag(Side::Fetch)));
                    ends.is_some_and(|ends| ends.contains(&None))
                };
                let engines = script.decode.iter().map(|engine| &self.cluster.engines[*engine]);
                let without = engines.filter(|engine| !engine.ranks.iter().all(has)).count();
                assert!(
                    without <= usize::from(script.declined && script.serves > 1),
                    "{:?} of rank {rank} is delivered, but {without} of its engines lack it",
                    script.transfer,
                );
            }
        }
    }
}

/// One seed, from beginning to end.
pub(crate) fn one(seed: u64) -> Cluster {
    let mut storm = Storm::new(seed);
    storm.run(HORIZON);
    storm.wind_down();
    storm.cluster
}
