//! Simulated engines: ranks that attach, fill pages, publish, fetch, and die.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_broker::{Input, RegionKey, SessionId};
use kvferry_control::{Answer, Call, Event, Fault, Fetch, Path, Publish, TransferId};
use kvferry_handshake::{Envelope, PageLists, Ready, TokenRange};

use crate::data::Memory;
use crate::geometry::{HEADS, LAYERS, PAGE, POOL, ROW, page_bytes};
use crate::ledger::{Side, Tag};
use crate::sim::Cluster;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) envelope: Envelope,
    pub(crate) home: usize,
    pub(crate) ranks: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct SimRank {
    pub(crate) engine: usize,
    pub(crate) rank: u32,
    pub(crate) node: usize,
    pub(crate) session: Option<SessionId>,
    pub(crate) attached: bool,
    /// Region number to (key, generation).
    pub(crate) regions: BTreeMap<u16, (RegionKey, u64)>,
    /// Pages that nothing holds.
    pub(crate) free: Vec<u32>,
    /// Pages by what holds them.
    pub(crate) held: BTreeMap<Tag, PageLists>,
    pub(crate) calls: BTreeMap<u64, Asked>,
    pub(crate) answers: BTreeMap<u64, Result<Answer, Fault>>,
    pub(crate) events: Vec<Event>,
}

/// What a call was for.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Attach,
    Register(u16, RegionKey),
    Unregister(u16),
    Transfer(Tag),
    Other,
}

/// A transfer's tokens as the engine would have computed them.
pub(crate) fn row(
    engine: &str,
    transfer: &TransferId,
    layer: u32,
    part: u16,
    head: u32,
    token: u64,
) -> [u8; 4] {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut eat = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    eat(engine.as_bytes());
    eat(transfer.id.as_bytes());
    eat(&transfer.attempt.to_le_bytes());
    eat(&layer.to_le_bytes());
    eat(&part.to_le_bytes());
    eat(&head.to_le_bytes());
    eat(&token.to_le_bytes());
    let [a, b, c, d, ..] = hash.to_le_bytes();
    // Never the poison.
    [a | 1, b, c, d]
}

/// Where a row of a rank lies in the region of its part.
pub(crate) fn place(tp: u32, rank: u32, pages: &[u32], layer: u32, head: u32, token: u64) -> Option<u64> {
    let page = *pages.get(usize::try_from(token / u64::from(PAGE)).unwrap())?;
    let heads = u64::from(HEADS / tp);
    let local = u64::from(head)
        .checked_sub(u64::from(rank) * heads)
        .filter(|head| *head < heads)?;
    let token_stride = heads * ROW;
    let in_page = u64::from(layer) * token_stride * u64::from(PAGE) + token % u64::from(PAGE) * token_stride;
    Some(u64::from(page) * page_bytes(tp) + in_page + local * ROW)
}

impl Cluster {
    /// An engine whose rank `r` is on node `nodes[r]`; its home is that of rank 0.
    pub(crate) fn engine(&mut self, envelope: Envelope, nodes: &[usize]) -> usize {
        assert_eq!(envelope.ranks.len(), nodes.len());
        let engine = self.engines.len();
        let mut ranks = Vec::new();
        for (rank, node) in (0u32..).zip(nodes) {
            ranks.push(self.ranks.len());
            self.ranks.push(SimRank {
                engine,
                rank,
                node: *node,
                session: None,
                attached: false,
                regions: BTreeMap::new(),
                free: Vec::new(),
                held: BTreeMap::new(),
                calls: BTreeMap::new(),
                answers: BTreeMap::new(),
                events: Vec::new(),
            });
        }
        self.engines.push(Engine {
            envelope,
            home: nodes[0],
            ranks,
        });
        engine
    }

    /// Attaches all ranks of an engine and registers their regions.
    pub(crate) fn start(&mut self, engine: usize) {
        for rank in self.engines[engine].ranks.clone() {
            self.attach(rank);
        }
        let ready = |cluster: &Cluster| {
            let mut ranks = cluster.engines[engine].ranks.iter();
            ranks.all(|rank| cluster.is_ready(*rank))
        };
        assert!(self.run_until(5_000_000, ready), "the engine attaches");
    }

    pub(crate) fn is_ready(&self, rank: usize) -> bool {
        let rank = &self.ranks[rank];
        let placements = &self.engines[rank.engine].envelope.ranks[rank.rank as usize].placements;
        let regions: BTreeSet<u16> = placements.iter().map(|placement| placement.region).collect();
        rank.attached && rank.regions.len() == regions.len()
    }

    pub(crate) fn attach(&mut self, rank: usize) -> u64 {
        let envelope = self.engines[self.ranks[rank].engine].envelope.clone();
        self.attach_as(rank, envelope)
    }

    pub(crate) fn attach_as(&mut self, rank: usize, envelope: Envelope) -> u64 {
        let node = self.ranks[rank].node;
        let home = self.engines[self.ranks[rank].engine].home;
        let session = match self.ranks[rank].session {
            Some(session) => session,
            None => self.new_session(node),
        };
        self.ranks[rank].session = Some(session);
        let home = (home != node).then(|| self.nodes[home].address.0.to_string());
        let number = self.next_call + 1;
        self.ranks[rank].calls.insert(number, Asked::Attach);
        let call = Call::Attach {
            envelope: Box::new(envelope),
            rank: self.ranks[rank].rank,
            home,
        };
        self.call(node, session, call)
    }

    pub(crate) fn rank_call(&mut self, rank: usize, asked: Asked, call: Call) -> u64 {
        let session = self.ranks[rank].session.expect("the rank has a session");
        let number = self.next_call + 1;
        self.ranks[rank].calls.insert(number, asked);
        self.call(self.ranks[rank].node, session, call)
    }

    /// Registers one region; the page pool is that of its first.
    pub(crate) fn register(&mut self, rank: usize, region: u16, len: u64) -> u64 {
        let session = self.ranks[rank].session.expect("the rank has a session");
        let node = self.ranks[rank].node;
        let key = RegionKey(self.next_region);
        self.next_region += 1;
        let size = usize::try_from(len).unwrap();
        let memory = Memory {
            bytes: vec![0xee; size],
            writers: vec![0; size],
        };
        self.nodes[node].data.memory.insert(key, memory);
        self.ledger.regions.insert(key, (rank, BTreeMap::new()));
        self.next_call += 1;
        let number = self.next_call;
        self.ranks[rank]
            .calls
            .insert(number, Asked::Register(region, key));
        self.input(
            node,
            Input::Registered {
                session,
                number,
                region,
                key,
                len,
                paths: vec![Path::Local, Path::Tcp],
            },
        );
        number
    }

    pub(crate) fn answered(
        &mut self,
        node: usize,
        session: SessionId,
        number: u64,
        answer: Result<Answer, Fault>,
    ) {
        if let Err(fault) = &answer {
            self.ledger.saw_code(fault.code, "answer");
        }
        let found = self
            .ranks
            .iter()
            .position(|rank| rank.node == node && rank.session == Some(session));
        let rank = found.unwrap_or_else(|| panic!("an answer for a closed session: {answer:?}"));
        let asked = self.ranks[rank]
            .calls
            .remove(&number)
            .expect("a call is answered once");
        match (&asked, &answer) {
            (Asked::Attach, Ok(_)) => {
                self.ranks[rank].attached = true;
                self.ranks[rank].free = (0..POOL).rev().collect();
                self.ranks[rank].held.clear();
                let engine = &self.engines[self.ranks[rank].engine].envelope;
                let regions = engine.region_bytes(self.ranks[rank].rank);
                for (region, len) in regions {
                    if self.registers {
                        self.register(rank, region, len);
                    }
                }
            }
            (Asked::Register(region, key), Ok(Answer::Registered { generation, .. })) => {
                self.ranks[rank].regions.insert(*region, (*key, *generation));
            }
            (Asked::Attach, Err(_)) => self.unattached.push(rank),
            (Asked::Unregister(region), Ok(_)) => {
                self.ranks[rank].regions.remove(region);
                let engine = &self.engines[self.ranks[rank].engine].envelope;
                let len = engine.region_bytes(self.ranks[rank].rank)[region];
                if self.registers {
                    self.register(rank, *region, len);
                }
            }
            (Asked::Transfer(tag), Ok(_)) => self.ledger.accepted(rank, session, tag, self.now),
            (Asked::Transfer(tag), Err(_)) if !self.ledger.is_open(rank, session, tag) => {
                self.give_back(rank, tag);
            }
            _ => {}
        }
        self.ranks[rank].answers.insert(number, answer);
    }

    /// The rank's connection is gone, with the daemon or by itself.
    pub(crate) fn rank_lost(&mut self, rank: usize) {
        let it = &mut self.ranks[rank];
        it.session = None;
        it.attached = false;
        it.regions.clear();
        it.calls.clear();
        it.held.clear();
    }

    pub(crate) fn disconnect(&mut self, rank: usize) {
        if let Some(session) = self.ranks[rank].session {
            let node = self.ranks[rank].node;
            self.rank_lost(rank);
            self.ledger.session_died(rank, session);
            self.input(node, Input::Disconnected { session });
        }
    }

    pub(crate) fn generations(&self, rank: usize) -> Vec<(u16, u64)> {
        if let Some(claims) = &self.claims {
            return claims.clone();
        }
        let regions = self.ranks[rank].regions.iter();
        regions
            .map(|(number, (_, generation))| (*number, *generation))
            .collect()
    }

    /// Takes pages for so many tokens; `None` if the pool has too few.
    pub(crate) fn take_pages(&mut self, rank: usize, tag: &Tag, tokens: u64) -> Option<PageLists> {
        let count = usize::try_from(tokens.div_ceil(u64::from(PAGE))).unwrap();
        if self.ranks[rank].free.len() < count {
            return None;
        }
        let at = self.ranks[rank].free.len() - count;
        let list = self.ranks[rank].free.split_off(at);
        let lists = PageLists { groups: vec![list] };
        self.hold(rank, tag, &lists);
        Some(lists)
    }

    fn hold(&mut self, rank: usize, tag: &Tag, lists: &PageLists) {
        let bytes = page_bytes(self.tp(rank));
        let node = self.ranks[rank].node;
        for (region, (key, _)) in self.ranks[rank].regions.clone() {
            if region > 1 {
                continue;
            }
            for page in &lists.groups[0] {
                self.ledger.hold(key, *page, tag.clone());
                let memory = self.nodes[node]
                    .data
                    .memory
                    .get_mut(&key)
                    .expect("it is registered");
                let from = usize::try_from(u64::from(*page) * bytes).unwrap();
                let range = from..from + usize::try_from(bytes).unwrap();
                memory.bytes[range.clone()].fill(0xee);
                memory.writers[range].fill(0);
            }
        }
        self.ranks[rank].held.insert(tag.clone(), lists.clone());
    }

    pub(crate) fn give_back(&mut self, rank: usize, tag: &Tag) {
        if let Some(lists) = self.ranks[rank].held.remove(tag) {
            for (_, (key, _)) in self.ranks[rank].regions.clone() {
                for page in &lists.groups[0] {
                    self.ledger.free(key, *page);
                }
            }
            self.ranks[rank].free.extend(lists.groups[0].iter().copied());
        }
    }

    pub(crate) fn tp(&self, rank: usize) -> u32 {
        u32::try_from(self.engines[self.ranks[rank].engine].ranks.len()).unwrap()
    }

    /// Writes what the model computed for these tokens.
    pub(crate) fn compute(
        &mut self,
        rank: usize,
        transfer: &TransferId,
        tokens: std::ops::Range<u64>,
        layers: u32,
    ) {
        let tag = (Side::Publish, transfer.clone());
        let tp = self.tp(rank);
        let (node, number) = (self.ranks[rank].node, self.ranks[rank].rank);
        let name = self.engines[self.ranks[rank].engine]
            .envelope
            .identity
            .engine
            .clone();
        let Some(lists) = self.ranks[rank].held.get(&tag).cloned() else {
            return;
        };
        for part in 0u16..2 {
            let Some((key, _)) = self.ranks[rank].regions.get(&part).copied() else {
                continue;
            };
            let memory = self.nodes[node]
                .data
                .memory
                .get_mut(&key)
                .expect("it is registered");
            for token in tokens.clone() {
                for layer in 0..layers {
                    for head in 0..HEADS {
                        if let Some(at) = place(tp, number, &lists.groups[0], layer, head, token) {
                            let at = usize::try_from(at).unwrap();
                            let bytes = row(&name, transfer, layer, part, head, token);
                            memory.bytes[at..at + 4].copy_from_slice(&bytes);
                        }
                    }
                }
            }
        }
    }

    /// Publishes: what `ready` says is computed first. Pages are taken for `prompt` tokens at the first call.
    pub(crate) fn publish(
        &mut self,
        rank: usize,
        transfer: &TransferId,
        prompt: u64,
        ready: Ready,
        serves: u32,
        metadata: Option<Vec<u8>>,
    ) -> Option<u64> {
        let tag = (Side::Publish, transfer.clone());
        if !self.ranks[rank].held.contains_key(&tag) {
            self.take_pages(rank, &tag, prompt)?;
        }
        self.compute(rank, transfer, 0..ready.end.unwrap_or(ready.tokens), LAYERS);
        if ready.end.is_none() && ready.front_layers > 0 {
            self.compute(rank, transfer, 0..ready.front_tokens, ready.front_layers);
        }
        let pages = self.ranks[rank].held.get(&tag).cloned();
        let call = Call::Publish(Publish {
            transfer: transfer.clone(),
            pages,
            generations: self.generations(rank),
            ready,
            metadata,
            serves,
        });
        Some(self.rank_call(rank, Asked::Transfer(tag), call))
    }

    pub(crate) fn source(&self, engine: usize) -> String {
        let engine = &self.engines[engine];
        format!(
            "kvferry://{}/{}",
            self.nodes[engine.home].address.0, engine.envelope.identity.engine
        )
    }

    pub(crate) fn fetch(
        &mut self,
        rank: usize,
        from: usize,
        transfer: &TransferId,
        tokens: TokenRange,
        least: u64,
    ) -> Option<u64> {
        let tag = (Side::Fetch, transfer.clone());
        let pages = match self.ranks[rank].held.get(&tag) {
            Some(pages) => pages.clone(),
            None => self.take_pages(rank, &tag, tokens.to)?,
        };
        let session = self.ranks[rank].session?;
        self.ledger
            .wants(rank, session, transfer, from, (tokens, least), &pages);
        let call = Call::Fetch(Fetch {
            source: self.source(from),
            transfer: transfer.clone(),
            pages,
            generations: self.generations(rank),
            tokens,
            least,
        });
        Some(self.rank_call(rank, Asked::Transfer(tag), call))
    }

    pub(crate) fn abort(&mut self, rank: usize, transfer: &TransferId) -> u64 {
        self.ledger.stir(transfer, self.now);
        let transfer = transfer.clone();
        self.rank_call(rank, Asked::Other, Call::Abort { transfer })
    }

    pub(crate) fn unregister(&mut self, rank: usize, region: u16) -> u64 {
        self.rank_call(rank, Asked::Unregister(region), Call::Unregister { region })
    }

    pub(crate) fn hint(&mut self, rank: usize, from: usize, transfer: &TransferId, decline: bool) -> u64 {
        self.ledger.stir(transfer, self.now);
        let (source, transfer) = (self.source(from), transfer.clone());
        let call = if decline {
            Call::Decline { source, transfer }
        } else {
            Call::Expect { source, transfer }
        };
        self.rank_call(rank, Asked::Other, call)
    }

    pub(crate) fn event(&mut self, node: usize, session: SessionId, event: Event) {
        let found = self
            .ranks
            .iter()
            .position(|rank| rank.node == node && rank.session == Some(session));
        let rank = found.unwrap_or_else(|| panic!("an event for a closed session: {event:?}"));
        self.ledger.saw_event(rank, session, &event, self.now);
        if let Event::Detached { .. } = &event {
            let it = &mut self.ranks[rank];
            assert!(it.attached, "only what is attached is detached");
            it.attached = false;
            it.regions.clear();
            it.held.clear();
            self.unattached.push(rank);
        }
        self.ranks[rank].events.push(event);
    }

    pub(crate) fn answer_to(&self, rank: usize, number: u64) -> &Result<Answer, Fault> {
        self.ranks[rank]
            .answers
            .get(&number)
            .expect("the call was answered")
    }
}

/// A transfer id.
pub(crate) fn id(id: &str, attempt: u32) -> TransferId {
    TransferId {
        id: id.to_owned(),
        attempt,
    }
}

/// Tokens.
pub(crate) fn tokens(from: u64, to: u64) -> TokenRange {
    TokenRange { from, to }
}
