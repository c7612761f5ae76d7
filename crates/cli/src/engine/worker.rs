//! One rank at work: carries out orders, follows transfers to their end, and verifies.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_client::{ClientError, Delivered, Event, Failed, Notice, Notices, Path, Rank, Side, TransferId};
use kvferry_handshake::{Code, Mismatch, PageLists};
use kvferry_plan::MAX_TOKENS;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use super::content::{Content, Extent};
use super::fetch::Fetched;
use super::pattern::{Filling, name_hash};
use super::pool::Pool;
use super::publish::Source;
use super::report::{Found, Teller, Told, report_bytes};
use super::run::region;
use super::scatter::FreePages;
use super::script::Order;
use crate::exit::Exit;
use crate::page_lists::RankedLists;

/// One rank.
pub(crate) struct Worker {
    pub(crate) rank: Rank,
    number: u32,
    pub(crate) pool: Pool,
    pub(crate) free: FreePages,
    pub(crate) teller: Teller,
    /// Overwrite a transfer's pages as soon as it is settled, as an engine that needs them does.
    overwrite: bool,
    pub(crate) sources: HashMap<TransferId, Source>,
    pub(crate) fetches: HashMap<TransferId, Fetched>,
    pub(crate) unverified: Vec<(TransferId, PageLists)>,
    pub(crate) ends: mpsc::UnboundedSender<End>,
    pub(crate) open: usize,
    nonce: u64,
    exit: Exit,
}

/// A transfer that ended.
pub(crate) struct End {
    pub(crate) transfer: TransferId,
    pub(crate) side: Side,
    pub(crate) result: Result<Delivered, Failed>,
    pub(crate) at_us: u64,
}

/// The machine's monotonic clock in microseconds: equal in all processes.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec) * 1_000_000 + part(now.tv_nsec) / 1000
}

impl Worker {
    pub(crate) fn new(
        rank: Rank,
        number: u32,
        pool: Pool,
        teller: Teller,
        overwrite: bool,
    ) -> (Worker, mpsc::UnboundedReceiver<End>) {
        let (ends, ended) = mpsc::unbounded_channel();
        let free = FreePages::new(pool.rows().envelope());
        let worker = Worker {
            rank,
            number,
            pool,
            free,
            teller,
            overwrite,
            sources: HashMap::new(),
            fetches: HashMap::new(),
            unverified: Vec::new(),
            ends,
            open: 0,
            nonce: 0,
            exit: Exit::Done,
        };
        (worker, ended)
    }

    /// Carries out orders until there are no more and every transfer ended.
    pub(crate) async fn work(
        mut self,
        mut orders: mpsc::Receiver<Result<Order, String>>,
        mut ended: mpsc::UnboundedReceiver<End>,
        mut notices: Notices,
        audit: bool,
    ) -> anyhow::Result<Exit> {
        let mut waiting: Option<usize> = None;
        let mut last_order = false;
        loop {
            if waiting.is_some_and(|most| self.open <= most) {
                waiting = None;
                if last_order {
                    break;
                }
            }
            tokio::select! {
                biased;
                Some(end) = ended.recv() => self.end(end)?,
                Some(notice) = notices.next() => self.notice(notice)?,
                order = orders.recv(), if waiting.is_none() => match order {
                    Some(Ok(Order::Wait(wait))) => waiting = Some(wait.open),
                    Some(Ok(order)) => self.carry_out(order).await?,
                    Some(Err(message)) => self.error("the script", None, message, Vec::new())?,
                    None => {
                        waiting = Some(0);
                        last_order = true;
                    }
                },
            }
        }
        // What was told before the last transfer ended may still wait behind it.
        while let Ok(Some(notice)) = tokio::time::timeout(Duration::ZERO, notices.next()).await {
            self.notice(notice)?;
        }
        self.verify_unverified()?;
        if audit {
            self.audit()?;
        }
        Ok(self.exit)
    }

    async fn carry_out(&mut self, order: Order) -> anyhow::Result<()> {
        match order {
            Order::Fill(fill) => self.tried("fill", |worker| worker.fill(&fill, true).map(|_| ())),
            Order::Publish(publish) => self.publish(publish).await,
            Order::Fetch(fetch) => self.fetch(fetch).await,
            Order::Abort(named) => {
                let transfer = TransferId {
                    id: named.transfer,
                    attempt: named.attempt,
                };
                let answer = self.rank.abort(&transfer).await;
                self.answered("abort", answer)
            }
            Order::Expect(named) => {
                let transfer = TransferId {
                    id: named.transfer,
                    attempt: named.attempt,
                };
                let answer = self.rank.expect(&named.source, &transfer).await;
                self.answered("expect", answer)
            }
            Order::Decline(named) => {
                let transfer = TransferId {
                    id: named.transfer,
                    attempt: named.attempt,
                };
                let answer = self.rank.decline(&named.source, &transfer).await;
                self.answered("decline", answer)
            }
            Order::Wait(_) => Ok(()),
            Order::Verify(_) => self.verify_unverified(),
            Order::Audit(_) => self.audit(),
            Order::Unregister(of) => match self.rank.unregister(of.region).await {
                Ok(()) => self.teller.tell(&Told::Unregistered { region: of.region }),
                Err(error) => self.answered("unregister", Err(error)),
            },
            Order::Register(of) => self.register(&[of.region]).await,
            Order::Sleep(sleep) => {
                tokio::time::sleep(Duration::from_millis(sleep.ms)).await;
                Ok(())
            }
        }
    }

    /// Hands regions over, and tells what came of it.
    async fn register(&mut self, numbers: &[u16]) -> anyhow::Result<()> {
        let (mut regions, mut bytes) = (Vec::new(), 0);
        let mut paths: Option<Vec<Path>> = None;
        for number in numbers {
            let memory = match region(self.pool.regions(), *number) {
                Ok(memory) => memory,
                Err(error) => return self.error("register", None, format!("{error:#}"), Vec::new()),
            };
            let len = memory.len();
            match self.rank.register(*number, memory.region()?).await {
                Ok(registered) => {
                    regions.push((*number, registered.generation));
                    bytes += len;
                    // The paths that all of them can take.
                    let known = paths.get_or_insert_with(|| registered.paths.clone());
                    known.retain(|path| registered.paths.contains(path));
                }
                Err(error) => return self.answered("register", Err(error)),
            }
        }
        self.teller.tell(&Told::Registered {
            regions,
            bytes,
            paths: paths.unwrap_or_default(),
        })
    }

    /// Hands all regions over; gives [`Exit::Done`] when all were taken.
    pub(crate) async fn register_all(&mut self) -> anyhow::Result<Exit> {
        let regions: Vec<u16> = self.pool.regions().iter().map(|(region, _)| *region).collect();
        self.register(&regions).await?;
        Ok(self.exit)
    }

    pub(crate) fn next_nonce(&mut self) -> u64 {
        self.nonce += 1;
        self.nonce
    }

    /// Pages for `tokens` tokens: named, or drawn by a seed.
    pub(crate) fn pages(
        &mut self,
        transfer: &str,
        pages: Option<&str>,
        tokens: u64,
    ) -> anyhow::Result<PageLists> {
        anyhow::ensure!(
            tokens <= MAX_TOKENS,
            "{tokens} tokens; a prompt has {MAX_TOKENS} at most"
        );
        let envelope = self.pool.rows().envelope();
        let seed = match pages {
            None => name_hash(transfer),
            Some(text) => match text.strip_prefix("seed:") {
                Some(seed) => seed.parse().map_err(|_| {
                    anyhow::anyhow!("pages: {text:?}: write seed:N, or the pages: pages=3,7,9-20")
                })?,
                None => {
                    let lists = RankedLists::parse("pages", &[text.to_owned()], envelope)?;
                    let lists = lists.of("pages", self.number)?;
                    // Before it is taken: what the pool does not have must never count as free either.
                    self.pool.holds(&lists)?;
                    self.free.take(&lists);
                    return Ok(lists);
                }
            },
        };
        self.free.draw(envelope, self.number, tokens, seed)
    }

    fn end(&mut self, end: End) -> anyhow::Result<()> {
        self.open -= 1;
        self.tell_end(&end)?;
        match end.side {
            Side::Publish => {
                if let Some(source) = self.sources.remove(&end.transfer) {
                    if end.result.is_err() || self.overwrite {
                        self.reuse(&source.lists)?;
                    } else {
                        self.free.give_back(&source.lists);
                    }
                }
                Ok(())
            }
            Side::Fetch => match self.fetches.remove(&end.transfer) {
                Some(fetched) => self.fetch_ended(end, fetched),
                None => Ok(()),
            },
        }
    }

    /// Overwrites pages of a settled transfer, so that a byte that lands late, or is sent late, shows.
    pub(crate) fn reuse(&mut self, lists: &PageLists) -> anyhow::Result<()> {
        let nonce = self.next_nonce();
        let filling = Filling::new("", 0, nonce);
        self.pool.give(
            lists,
            &Arc::new(Content {
                nonce,
                filling,
                extent: Extent::Nothing,
            }),
            None,
        )?;
        self.free.give_back(lists);
        Ok(())
    }

    pub(crate) fn verify_unverified(&mut self) -> anyhow::Result<()> {
        for (transfer, lists) in std::mem::take(&mut self.unverified) {
            self.verify(&transfer, &lists)?;
            if self.overwrite {
                self.reuse(&lists)?;
            } else {
                self.free.give_back(&lists);
            }
        }
        Ok(())
    }

    pub(crate) fn verify(&mut self, transfer: &TransferId, lists: &PageLists) -> anyhow::Result<()> {
        let began = now_us();
        let checked = self.pool.check(lists)?;
        if !checked.is_right() {
            self.exit = Exit::Failed;
        }
        let found = Found::new(checked, now_us() - began);
        let (transfer, attempt) = (transfer.id.clone(), transfer.attempt);
        self.teller.tell(&Told::Verified {
            transfer,
            attempt,
            found,
        })
    }

    fn audit(&mut self) -> anyhow::Result<()> {
        let began = now_us();
        let checked = self.pool.audit()?;
        if !checked.is_right() {
            self.exit = Exit::Failed;
        }
        self.teller.tell(&Told::Audited {
            found: Found::new(checked, now_us() - began),
        })
    }

    fn tell_end(&mut self, end: &End) -> anyhow::Result<()> {
        let (side, transfer, attempt) = (end.side.name(), end.transfer.id.clone(), end.transfer.attempt);
        let told = match &end.result {
            Ok(delivered) => Told::Delivered {
                side,
                transfer,
                attempt,
                tokens: delivered.tokens,
                bytes: report_bytes(&delivered.report),
                paths: delivered.report.paths.clone(),
                peers: delivered.report.peers.clone(),
                moves: delivered.report.moves,
                resent: delivered.report.resent,
                bounced: delivered.report.bounced,
                met_us: delivered.report.met_us,
                moved_us: delivered.report.moved_us,
                metadata: (!delivered.metadata.is_empty())
                    .then(|| String::from_utf8_lossy(&delivered.metadata).into_owned()),
                at_us: end.at_us,
            },
            Err(failed) => {
                let refused = failed.cause.code == Code::LinkRefused;
                self.failed(refused);
                Told::Failed {
                    side,
                    transfer,
                    attempt,
                    code: failed.cause.code.to_string(),
                    message: failed.cause.message.clone(),
                    mismatches: failed.cause.mismatches.clone(),
                    bytes: report_bytes(&failed.report),
                    at_us: end.at_us,
                }
            }
        };
        self.teller.tell(&told)
    }

    pub(crate) fn failed(&mut self, refused: bool) {
        if self.exit == Exit::Done {
            self.exit = if refused { Exit::Refused } else { Exit::Failed };
        }
    }

    fn notice(&mut self, notice: Notice) -> anyhow::Result<()> {
        let message = match notice {
            Notice::Event(Event::Refused { engine, verdict }) => {
                return self.teller.tell(&Told::Refused { engine, verdict });
            }
            Notice::Event(Event::Matched {
                transfer,
                engine,
                held,
            }) => {
                format!(
                    "{} was matched by {engine}, which holds {held} tokens",
                    transfer.id
                )
            }
            Notice::Event(Event::Detached { cause }) => format!("the attachment was taken back: {cause}"),
            Notice::Event(_) => return Ok(()),
            Notice::DaemonLost => "the daemon is gone; connecting again".to_owned(),
            Notice::DaemonBack { welcome } => format!(
                "attached again to kvferryd {} at {}",
                welcome.release, welcome.address
            ),
            Notice::Refused { cause } => format!("the daemon came back and refuses this rank: {cause}"),
        };
        self.teller.tell(&Told::Notice { message })
    }

    pub(crate) fn tried(
        &mut self,
        order: &str,
        act: impl FnOnce(&mut Worker) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match act(self) {
            Ok(()) => Ok(()),
            Err(error) => self.error(order, None, format!("{error:#}"), Vec::new()),
        }
    }

    pub(crate) fn answered(&mut self, order: &str, answer: Result<(), ClientError>) -> anyhow::Result<()> {
        match answer {
            Ok(()) => Ok(()),
            Err(ClientError::Refused(fault)) => {
                let refused = fault.code == Code::LinkRefused;
                self.failed(refused);
                self.error(
                    order,
                    Some(fault.code.to_string()),
                    fault.message,
                    fault.mismatches,
                )
            }
            Err(error) => self.error(order, None, error.to_string(), Vec::new()),
        }
    }

    pub(crate) fn error(
        &mut self,
        order: &str,
        code: Option<String>,
        message: String,
        mismatches: Vec<Mismatch>,
    ) -> anyhow::Result<()> {
        self.failed(false);
        self.teller.tell(&Told::Error {
            order: order.to_owned(),
            code,
            message,
            mismatches,
        })
    }
}
