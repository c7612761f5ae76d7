//! What must hold, kept as it happens: who holds which page, what was accepted, how it ended.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_broker::{JobId, Record, RegionKey, SessionId};
pub(crate) use kvferry_control::Side;
use kvferry_control::{Event, Fault, Report, TransferId};
use kvferry_handshake::{Code, PageLists, TokenRange};

use crate::engines::{place, row};
use crate::geometry::{HEADS, LAYERS, PAGE, page_bytes};
use crate::sim::Cluster;

/// A transfer of one rank, on one side.
pub(crate) type Tag = (Side, TransferId);

#[derive(Clone, Debug)]
pub(crate) struct Want {
    pub(crate) from: usize,
    pub(crate) tokens: TokenRange,
    pub(crate) least: u64,
    pub(crate) pages: PageLists,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// Region to its rank and the holders of its pages.
    pub(crate) regions: BTreeMap<RegionKey, (usize, BTreeMap<u32, Tag>)>,
    /// Which transfer a job works for, from its first byte on: (node, job, write).
    jobs: BTreeMap<(usize, JobId, bool), (usize, Tag)>,
    /// Accepted and not ended: when anything last happened to it.
    pub(crate) open: BTreeMap<(usize, SessionId, Tag), u64>,
    wants: BTreeMap<(usize, SessionId, TransferId), Want>,
    /// Ended, by event; of live sessions.
    pub(crate) ended: BTreeMap<(usize, SessionId, Tag), Option<Code>>,
    /// Ended, by record: every end, also of ranks that are gone.
    pub(crate) records: BTreeMap<(usize, Tag), Vec<Option<Code>>>,
    stirred: BTreeMap<TransferId, u64>,
    dead: BTreeSet<(usize, SessionId)>,
    pub(crate) codes: BTreeMap<(Code, &'static str), u64>,
    pub(crate) events: BTreeMap<&'static str, u64>,
    pub(crate) delivered_bytes: u64,
    /// Terminal events that no record followed yet.
    told: BTreeSet<(usize, SessionId, Tag)>,
    /// The engines' bytes lie otherwise than the ledger knows.
    pub(crate) other_geometry: bool,
    /// The brokers forget so soon what ended that an id can be used again.
    pub(crate) forgetful: bool,
}

impl Ledger {
    pub(crate) fn saw_code(&mut self, code: Code, how: &'static str) {
        *self.codes.entry((code, how)).or_default() += 1;
    }

    pub(crate) fn hold(&mut self, region: RegionKey, page: u32, tag: Tag) {
        let pages = &mut self.regions.get_mut(&region).expect("a region").1;
        let before = pages.insert(page, tag);
        assert!(
            before.is_none(),
            "the engine takes a page that something holds: {before:?}"
        );
    }

    pub(crate) fn free(&mut self, region: RegionKey, page: u32) {
        if let Some((_, pages)) = self.regions.get_mut(&region) {
            pages.remove(&page);
        }
    }

    pub(crate) fn accepted(&mut self, rank: usize, session: SessionId, tag: &Tag, now: u64) {
        let key = (rank, session, tag.clone());
        if self.forgetful {
            self.ended.remove(&key);
        }
        assert!(
            !self.ended.contains_key(&key),
            "{key:?} is accepted after its end"
        );
        self.open.insert(key, now);
        self.stir(&tag.1, now);
    }

    /// Something happened to the transfer, on whichever side and rank.
    pub(crate) fn stir(&mut self, transfer: &TransferId, now: u64) {
        self.stirred.insert(transfer.clone(), now);
    }

    pub(crate) fn stirred(&self, transfer: &TransferId) -> u64 {
        self.stirred.get(transfer).copied().unwrap_or_default()
    }

    pub(crate) fn is_open(&self, rank: usize, session: SessionId, tag: &Tag) -> bool {
        self.open.contains_key(&(rank, session, tag.clone()))
    }

    pub(crate) fn wants(
        &mut self,
        rank: usize,
        session: SessionId,
        transfer: &TransferId,
        from: usize,
        (tokens, least): (TokenRange, u64),
        pages: &PageLists,
    ) {
        let want = Want {
            from,
            tokens,
            least,
            pages: pages.clone(),
        };
        // A call that was refused before is forgotten; one that is open stays what it is.
        let tag = (Side::Fetch, transfer.clone());
        if !self.is_open(rank, session, &tag) {
            self.wants.insert((rank, session, transfer.clone()), want);
        }
    }

    pub(crate) fn session_died(&mut self, rank: usize, session: SessionId) {
        self.dead.insert((rank, session));
        self.open
            .retain(|(other, of, _), _| (*other, *of) != (rank, session));
    }

    /// Everything of a node is gone, without a word.
    pub(crate) fn node_died(&mut self, node: usize) {
        self.jobs.retain(|(of, _, _), _| *of != node);
    }

    pub(crate) fn saw_event(&mut self, rank: usize, session: SessionId, event: &Event, now: u64) {
        let (name, tag) = match event {
            Event::Matched { transfer, .. } => ("matched", Some((Side::Publish, transfer))),
            Event::Progress { side, transfer, .. } => ("progress", Some((*side, transfer))),
            Event::Delivered { side, transfer, .. } => ("delivered", Some((*side, transfer))),
            Event::Failed {
                side,
                transfer,
                cause,
                report,
            } => {
                self.saw_code(cause.code, "failed");
                check_words(*side, cause, report);
                ("failed", Some((*side, transfer)))
            }
            Event::Refused { verdict, .. } => {
                for mismatch in &verdict.mismatches {
                    self.saw_code(mismatch.code, "refused");
                }
                ("refused", None)
            }
            Event::Detached { cause } => {
                self.saw_code(cause.code, "detached");
                ("detached", None)
            }
        };
        *self.events.entry(name).or_default() += 1;
        let Some((side, transfer)) = tag else {
            return;
        };
        assert!(!self.dead.contains(&(rank, session)));
        self.stir(transfer, now);
        let key = (rank, session, (side, transfer.clone()));
        match event {
            Event::Matched { .. } | Event::Progress { .. } => match self.open.get_mut(&key) {
                Some(at) => *at = now,
                None => panic!("{event:?} of a transfer of rank {rank} that is not open"),
            },
            _ => assert!(
                self.told.insert(key),
                "{event:?} after an end of the same transfer"
            ),
        }
    }
}

/// However a transfer ends: the rank's own phase, a peer unless none came, and the bytes of its report. Those of another rank
/// may stand before them.
fn check_words(side: Side, cause: &Fault, report: &Report) {
    let bytes: u64 = report.paths.iter().map(|(_, bytes)| bytes).sum();
    let (phase, done) = match side {
        Side::Fetch => ("fetch, ", format!("; {bytes} of ")),
        Side::Publish => ("publish, ", format!("; {bytes} bytes done]")),
    };
    let at = cause.message.rfind(&format!("[here: {phase}"));
    let at = at.or_else(|| cause.message.rfind(&format!("[{phase}")));
    let own = &cause.message[at.unwrap_or_else(|| panic!("no phase: {cause}"))..];
    assert!(
        own.contains(&done) && own.ends_with(" bytes done]"),
        "{bytes} bytes: {cause}"
    );
    let brackets = cause.message.matches(" [").count();
    assert!(
        brackets <= 2,
        "how things stood, once there and once here: {cause}"
    );
    let named = cause.message[..cause.message.find(" [").unwrap()].matches(" of engine ");
    assert!(
        named.count() <= 2,
        "where it arose, and who aborted it, and no way that it went: {cause}"
    );
    let peer = own.contains(" at ") || own.contains("waiting for a decode engine");
    assert!(peer, "no peer: {cause}");
}

impl Cluster {
    /// Bytes were read or written: only of pages whose holder is open, and always for the same transfer.
    pub(crate) fn check_touched(&mut self, node: usize) {
        let now = self.now;
        for touch in std::mem::take(&mut self.nodes[node].data.touched) {
            if self.ledger.other_geometry {
                continue;
            }
            let (rank, pages) = self.ledger.regions.get(&touch.region).expect("a region");
            let rank = *rank;
            let page = u32::try_from(touch.offset / page_bytes(self.tp(rank))).unwrap();
            let tag = pages.get(&page).cloned();
            let Some(tag) = tag else {
                panic!("{touch:?} of page {page} of rank {rank}, which nothing holds: it is settled");
            };
            let side = if touch.write { Side::Fetch } else { Side::Publish };
            assert_eq!(tag.0, side, "{touch:?} of rank {rank}'s {tag:?}");
            let key = (node, touch.job, touch.write);
            let known = self.ledger.jobs.entry(key).or_insert_with(|| (rank, tag.clone()));
            assert_eq!(
                *known,
                (rank, tag.clone()),
                "{touch:?} works for another transfer than before"
            );
            let mut open = self
                .ledger
                .open
                .iter_mut()
                .filter(|((of, _, other), _)| *of == rank && *other == tag);
            if let Some((_, at)) = open.next() {
                *at = now;
            }
        }
    }

    pub(crate) fn released(&mut self, node: usize, key: RegionKey) {
        let memory = self.nodes[node].data.memory.remove(&key);
        assert!(memory.is_some(), "{key:?} is released once");
        // Nothing may hold pages of it but what has no session to hold them for.
        let (rank, pages) = self.ledger.regions.remove(&key).expect("a region");
        assert!(
            pages.is_empty(),
            "rank {rank}'s region is released under {pages:?}"
        );
    }

    /// A transfer ended on one side, for one rank.
    pub(crate) fn recorded(&mut self, node: usize, record: Record) {
        let side = record.side;
        let tag = (side, record.transfer.clone());
        let rank = self
            .ranks
            .iter()
            .position(|rank| {
                rank.node == node
                    && rank.rank == record.rank
                    && self.engines[rank.engine].envelope.identity.engine == record.engine
            })
            .expect("a record of a rank");
        if let Some(cause) = &record.cause {
            self.ledger.saw_code(cause.code, "record");
            assert!(!cause.message.is_empty());
        }
        let code = record.cause.as_ref().map(|cause| cause.code);
        let event = self.ranks[rank]
            .session
            .map(|session| (rank, session, tag.clone()));
        if let Some(key) = event.filter(|key| self.ledger.open.remove(key).is_some()) {
            let (session, last) = (key.1, self.ranks[rank].events.last().cloned());
            match last {
                Some(Event::Delivered {
                    side: of,
                    transfer,
                    tokens,
                    report,
                    ..
                }) => {
                    assert_eq!(
                        ((of, transfer), None),
                        (tag.clone(), code),
                        "the record tells what the event told"
                    );
                    assert_eq!(report, record.report);
                    if side == Side::Fetch {
                        self.check_delivered(rank, session, &tag.1, tokens);
                    }
                }
                Some(Event::Failed {
                    side: of,
                    transfer,
                    cause,
                    ..
                }) => {
                    assert_eq!(((of, transfer), Some(cause.code)), (tag.clone(), code));
                }
                other => panic!("{key:?} ended with {other:?}"),
            }
            let told = self.ledger.told.remove(&key);
            assert!(told, "{key:?} has a record and no event");
            let before = self.ledger.ended.insert(key.clone(), code);
            assert!(before.is_none(), "{key:?} ends twice");
        }
        self.ledger
            .records
            .entry((rank, tag.clone()))
            .or_default()
            .push(code);
        // Settled: the pages are the engine's again.
        self.give_back(rank, &tag);
        // Those of an earlier life of the rank have no engine any more to be given back to.
        let current: Vec<RegionKey> = self.ranks[rank].regions.values().map(|(key, _)| *key).collect();
        for (key, (of, pages)) in &mut self.ledger.regions {
            if *of == rank && !current.contains(key) {
                pages.retain(|_, holder| *holder != tag);
            }
        }
    }

    /// Every byte that was asked for is there, written (once a job: the data plane sees to that), and no other byte of those pages.
    fn check_delivered(&mut self, rank: usize, session: SessionId, transfer: &TransferId, end: u64) {
        if self.ledger.other_geometry {
            return;
        }
        let want = self
            .ledger
            .wants
            .get(&(rank, session, transfer.clone()))
            .cloned()
            .expect("it was asked for");
        let name = self.engines[want.from].envelope.identity.engine.clone();
        let (tp, number, node) = (self.tp(rank), self.ranks[rank].rank, self.ranks[rank].node);
        assert!(
            end <= want.tokens.to && end >= want.least,
            "{end} tokens for {want:?}"
        );
        if self.ledger.other_geometry {
            return;
        }
        for part in 0u16..2 {
            let (key, _) = self.ranks[rank].regions[&part];
            let memory = &self.nodes[node].data.memory[&key];
            for token in 0..want.pages.groups[0].len() as u64 * u64::from(PAGE) {
                for layer in 0..LAYERS {
                    for head in 0..HEADS {
                        let Some(at) = place(tp, number, &want.pages.groups[0], layer, head, token) else {
                            continue;
                        };
                        let at = usize::try_from(at).unwrap();
                        let wanted = (want.tokens.from..end).contains(&token);
                        let expected = if wanted {
                            (row(&name, transfer, layer, part, head, token), true)
                        } else {
                            ([0xee; 4], false)
                        };
                        let found: [u8; 4] = memory.bytes[at..at + 4].try_into().unwrap();
                        assert_eq!(
                            (found, memory.writers[at] != 0),
                            expected,
                            "rank {rank} {transfer:?} token {token} layer {layer} part {part} head {head}"
                        );
                        self.ledger.delivered_bytes += if wanted { 4 } else { 0 };
                    }
                }
            }
        }
    }
}
