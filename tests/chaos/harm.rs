//! What goes wrong, drawn by a seed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvferry_tests::proxy::pause;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::Signal;

use crate::Nodes;

/// Does harm to nodes.
pub(crate) struct Harm {
    pub(crate) nodes: Nodes,
    /// How often what was done.
    pub(crate) done: BTreeMap<&'static str, u32>,
    random: StdRng,
}

impl Harm {
    pub(crate) fn new(nodes: Nodes, seed: u64) -> Harm {
        Harm {
            nodes,
            done: BTreeMap::new(),
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Goes on until then; afterwards every node is up.
    pub(crate) async fn until(&mut self, end: Instant) {
        while Instant::now() < end {
            let calm = pause(
                &mut self.random,
                Duration::from_millis(200),
                Duration::from_millis(2_500),
            );
            tokio::time::sleep(calm).await;
            let at = self.random.random_range(0..self.nodes.nodes.len());
            let what = match self.random.random_range(0..10) {
                0..3 => self.kill(at).await,
                3..5 => self.stop(at).await,
                5..8 => self.cut_lanes(at),
                _ => self.cut(at),
            };
            *self.done.entry(what).or_default() += 1;
        }
    }

    async fn kill(&mut self, at: usize) -> &'static str {
        let away = pause(&mut self.random, Duration::ZERO, Duration::from_millis(1_500));
        let node = &mut self.nodes.nodes[at];
        node.kill();
        tokio::time::sleep(away).await;
        node.restart().await;
        "a daemon killed and started again"
    }

    async fn stop(&mut self, at: usize) -> &'static str {
        let long = pause(
            &mut self.random,
            Duration::from_millis(100),
            Duration::from_millis(3_500),
        );
        let process = self.nodes.nodes[at].process();
        process.signal(Signal::STOP);
        tokio::time::sleep(long).await;
        process.signal(Signal::CONT);
        "a daemon stopped for a while"
    }

    /// Shuts down the daemon's own ends of its lanes, behind its back.
    fn cut_lanes(&mut self, at: usize) -> &'static str {
        let ports: Vec<u16> = self.nodes.nodes.iter().map(|node| node.ports().data).collect();
        let node = &mut self.nodes.nodes[at];
        let cut = node.process().shut_down_sockets(&ports);
        if cut == 0 {
            "no lane to cut"
        } else {
            "data lanes cut"
        }
    }

    fn cut(&mut self, at: usize) -> &'static str {
        self.nodes.proxies[at].cut();
        "the channel cut"
    }
}
