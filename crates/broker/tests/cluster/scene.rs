//! Short ways to set a scene and to look at what came of it.

use kvferry_broker::{Body, PeerMessage};
use kvferry_control::{Event, Fault, TransferId};
use kvferry_handshake::{Code, Ready, Role};

use crate::engines::{id, tokens};
use crate::geometry::envelope;
use crate::sim::Cluster;

/// Long enough for everything that does not wait.
pub(crate) const MOMENT: u64 = 100_000;

/// A prefill and a decode engine, attached; rank `r` of each on the `r`th node named.
pub(crate) fn pair(cluster: &mut Cluster, prefill: &[usize], decode: &[usize]) -> (usize, usize) {
    let p = prefill_engine(cluster, prefill);
    let d = decode_engine(cluster, "d", decode);
    (p, d)
}

pub(crate) fn prefill_engine(cluster: &mut Cluster, nodes: &[usize]) -> usize {
    let p = cluster.engine(envelope("p", Role::Prefill, tp(nodes), 0), nodes);
    cluster.start(p);
    p
}

pub(crate) fn decode_engine(cluster: &mut Cluster, name: &str, nodes: &[usize]) -> usize {
    let d = cluster.engine(envelope(name, Role::Decode, tp(nodes), 0), nodes);
    cluster.start(d);
    d
}

pub(crate) fn tp(nodes: &[usize]) -> u32 {
    u32::try_from(nodes.len()).unwrap()
}

/// Both engines on two daemons each, the transfer published, fetched and stalled.
pub(crate) fn under_way() -> (Cluster, usize, usize) {
    let mut cluster = Cluster::new(1, 3);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    (cluster, p, d)
}

pub(crate) fn assert_codes(cluster: &Cluster, engine: usize, codes: &[Code]) {
    let found = cluster.codes_of(engine, &id("a", 0));
    let wanted: Vec<Option<Code>> = codes.iter().copied().map(Some).collect();
    assert_eq!(found, wanted);
}

impl Cluster {
    pub(crate) fn ranks_of(&self, engine: usize) -> Vec<usize> {
        self.engines[engine].ranks.clone()
    }

    /// Every rank publishes everything.
    pub(crate) fn publish_all(&mut self, engine: usize, transfer: &TransferId, prompt: u64) {
        for rank in self.ranks_of(engine) {
            let call = self.publish(rank, transfer, prompt, Ready::complete(prompt), 1, None);
            let call = call.expect("pages are free");
            assert!(
                self.answer_to(rank, call).is_ok(),
                "{:?}",
                self.answer_to(rank, call)
            );
        }
    }

    /// Every rank fetches `0..prompt`.
    pub(crate) fn fetch_all(&mut self, engine: usize, from: usize, transfer: &TransferId, prompt: u64) {
        for rank in self.ranks_of(engine) {
            let call = self.fetch(rank, from, transfer, tokens(0, prompt), prompt);
            let call = call.expect("pages are free");
            assert!(
                self.answer_to(rank, call).is_ok(),
                "{:?}",
                self.answer_to(rank, call)
            );
        }
    }

    /// How a rank's transfer ended, if it did, by its event.
    pub(crate) fn end_of(&self, rank: usize, transfer: &TransferId) -> Option<Result<u64, Fault>> {
        let ends = self.ranks[rank].events.iter().filter_map(|event| match event {
            Event::Delivered {
                transfer: of, tokens, ..
            } if of == transfer => Some(Ok(*tokens)),
            Event::Failed {
                transfer: of, cause, ..
            } if of == transfer => Some(Err(cause.clone())),
            _ => None,
        });
        let ends: Vec<_> = ends.collect();
        assert!(ends.len() <= 1, "it ends once: {ends:?}");
        ends.into_iter().next()
    }

    /// The code with which it failed.
    pub(crate) fn code_of(&self, rank: usize, transfer: &TransferId) -> Option<Code> {
        self.end_of(rank, transfer)?.err().map(|cause| cause.code)
    }

    pub(crate) fn all_delivered(&self, engine: usize, transfer: &TransferId) -> bool {
        let ranks = self.engines[engine].ranks.iter();
        ranks
            .clone()
            .all(|rank| matches!(self.end_of(*rank, transfer), Some(Ok(_))))
    }

    /// The codes with which an engine's ranks failed.
    pub(crate) fn codes_of(&self, engine: usize, transfer: &TransferId) -> Vec<Option<Code>> {
        let ranks = self.engines[engine].ranks.iter();
        ranks.map(|rank| self.code_of(*rank, transfer)).collect()
    }

    /// The code of a call's refusal.
    pub(crate) fn refusal(&self, rank: usize, call: u64) -> Code {
        match self.answer_to(rank, call) {
            Ok(answer) => panic!("the call was accepted: {answer:?}"),
            Err(fault) => fault.code,
        }
    }

    pub(crate) fn events_like(&self, rank: usize, like: impl Fn(&Event) -> bool) -> usize {
        self.ranks[rank].events.iter().filter(|event| like(event)).count()
    }

    /// From now on, loses messages that this names.
    pub(crate) fn lose(&mut self, named: impl Fn(&Body) -> bool + Send + 'static) {
        self.tamper = Some(Box::new(move |_, message| !named(&message.body)));
    }

    /// From now on, hands every message over to be changed; false loses it.
    pub(crate) fn change(&mut self, change: impl FnMut(usize, &mut PeerMessage) -> bool + Send + 'static) {
        self.tamper = Some(Box::new(change));
    }

    /// Messages arrive again.
    pub(crate) fn be_honest(&mut self) {
        self.tamper = None;
    }

    /// Everything that must return to zero is zero, when all engines are gone.
    pub(crate) fn assert_nothing_is_left(&mut self) {
        for rank in 0..self.ranks.len() {
            self.disconnect(rank);
        }
        self.unattached.clear();
        self.run_for(60 * crate::sim::DEADLINE);
        for (number, node) in self.nodes.iter().enumerate() {
            let Some(broker) = node.broker.as_ref() else {
                continue;
            };
            for (name, count) in broker.counts().into_iter().chain(broker.remembered()) {
                assert_eq!(count, 0, "{name} at node {number} after everything has gone");
            }
            assert!(broker.is_idle());
            assert!(node.data.is_idle(), "jobs are left open at node {number}");
            assert!(node.data.memory.is_empty(), "regions are left at node {number}");
        }
    }
}
