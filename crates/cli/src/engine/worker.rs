//! One rank at work: carries out orders, follows transfers to their end, and verifies.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_client::{
    ClientError, Delivered, Event, Failed, FetchRequest, Fetching, Notice, PublishRequest, Rank, TransferId,
};
use kvferry_handshake::{Code, Mismatch, PageLists, Ready, TokenRange};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use super::content::{Content, Extent};
use super::pattern::{Filling, name_hash};
use super::pool::Pool;
use super::report::{Found, Teller, Told, report_bytes};
use super::run::region;
use super::scatter::FreePages;
use super::script::{Fetch, Fill, Growth, Order, Publish, When};
use crate::exit::Exit;
use crate::page_lists::RankedLists;

/// One rank.
pub(crate) struct Worker {
    rank: Rank,
    number: u32,
    pool: Pool,
    free: FreePages,
    teller: Teller,
    /// Overwrite a transfer's pages as soon as it is settled, as an engine that needs them does.
    overwrite: bool,
    sources: HashMap<TransferId, Source>,
    fetches: HashMap<TransferId, Fetched>,
    unverified: Vec<(TransferId, PageLists)>,
    ends: mpsc::UnboundedSender<End>,
    open: usize,
    nonce: u64,
    exit: Exit,
}

struct Source {
    lists: PageLists,
    filling: Filling,
    extent: Extent,
    nonce: u64,
    filled: bool,
    /// Whether a task waits for its end.
    followed: bool,
}

struct Fetched {
    lists: PageLists,
    filling: Filling,
    from: u64,
    nonce: u64,
    verify: When,
}

/// A transfer that ended.
pub(crate) struct End {
    transfer: TransferId,
    side: Side,
    result: Result<Delivered, Failed>,
    at_us: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Publish,
    Fetch,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Publish => "publish",
            Side::Fetch => "fetch",
        }
    }
}

/// The machine's monotonic clock in microseconds: equal in all processes.
fn now_us() -> u64 {
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
        audit: bool,
    ) -> anyhow::Result<Exit> {
        let mut notices = self.rank.notices();
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
            Order::Register(of) => self.register(of.region).await,
            Order::Sleep(sleep) => {
                tokio::time::sleep(Duration::from_millis(sleep.ms)).await;
                Ok(())
            }
        }
    }

    /// Hands a region over and tells what came of it.
    pub(crate) async fn register(&mut self, number: u16) -> anyhow::Result<()> {
        let memory = match region(self.pool.regions(), number) {
            Ok(memory) => memory,
            Err(error) => return self.error("register", None, format!("{error:#}"), Vec::new()),
        };
        let bytes = memory.len();
        match self.rank.register(number, memory.region()?).await {
            Ok(registered) => self.teller.tell(&Told::Registered {
                region: number,
                bytes,
                generation: registered.generation,
                paths: registered.paths,
            }),
            Err(error) => self.answered("register", Err(error)),
        }
    }

    /// Hands all regions over.
    pub(crate) async fn register_all(&mut self) -> anyhow::Result<Exit> {
        let regions: Vec<u16> = self.pool.regions().iter().map(|(region, _)| *region).collect();
        for region in regions {
            self.register(region).await?;
        }
        Ok(self.exit)
    }

    fn next_nonce(&mut self) -> u64 {
        self.nonce += 1;
        self.nonce
    }

    /// Pages for `tokens` tokens: named, or drawn by a seed.
    fn pages(&mut self, transfer: &str, pages: Option<&str>, tokens: u64) -> anyhow::Result<PageLists> {
        let envelope = self.pool.rows().envelope();
        let seed = match pages {
            None => name_hash(transfer),
            Some(text) => match text.strip_prefix("seed:") {
                Some(seed) => seed.parse().map_err(|_| {
                    anyhow::anyhow!("pages: {text:?}: write seed:N, or the pages: kv=3,7,9-20")
                })?,
                None => {
                    let lists = RankedLists::parse("pages", &[text.to_owned()], envelope)?;
                    let lists = lists.of("pages", self.number)?;
                    self.free.take(&lists);
                    return Ok(lists);
                }
            },
        };
        self.free.draw(envelope, self.number, tokens, seed)
    }

    /// Draws pages for a prompt and, unless `now` is false, fills all of it.
    fn fill(&mut self, fill: &Fill, now: bool) -> anyhow::Result<TransferId> {
        let transfer = TransferId {
            id: fill.transfer.clone(),
            attempt: fill.attempt,
        };
        if self.sources.contains_key(&transfer) {
            return Ok(transfer);
        }
        let lists = self.pages(&fill.transfer, fill.pages.as_deref(), fill.tokens)?;
        let filling = Filling::new(&fill.transfer, fill.attempt, fill.generation);
        let nonce = self.next_nonce();
        let mut source = Source {
            lists,
            filling,
            extent: Extent::Nothing,
            nonce,
            filled: false,
            followed: false,
        };
        if now {
            self.fill_to(&transfer, &mut source, Ready::complete(fill.tokens))?;
        }
        self.sources.insert(transfer.clone(), source);
        Ok(transfer)
    }

    /// Writes what `ready` says is ready and was not before; at first, poison into the rest.
    fn fill_to(&mut self, transfer: &TransferId, source: &mut Source, ready: Ready) -> anyhow::Result<()> {
        let began = now_us();
        let extent = Extent::Ready(ready);
        let content = Arc::new(Content {
            nonce: source.nonce,
            filling: source.filling,
            extent,
        });
        let earlier = source.filled.then_some(&source.extent);
        let bytes = self.pool.give(&source.lists, &content, earlier)?;
        source.extent = extent;
        source.filled = true;
        self.teller.tell(&Told::Filled {
            transfer: transfer.id.clone(),
            attempt: transfer.attempt,
            tokens: ready.end.unwrap_or(ready.tokens.max(ready.front_tokens)),
            bytes,
            us: now_us() - began,
        })
    }

    async fn publish(&mut self, publish: Publish) -> anyhow::Result<()> {
        let fill = Fill {
            transfer: publish.transfer.clone(),
            attempt: publish.attempt,
            generation: publish.generation,
            tokens: publish.tokens,
            pages: publish.pages.clone(),
        };
        let transfer = match self.fill(&fill, false) {
            Ok(transfer) => transfer,
            Err(error) => return self.error("publish", None, format!("{error:#}"), Vec::new()),
        };
        let Some(mut source) = self.sources.remove(&transfer) else {
            return Ok(());
        };
        let upto = publish.upto.unwrap_or(publish.tokens).min(publish.tokens);
        let layers = self.pool.rows().layers();
        for step in 1..=publish.steps.max(1) {
            let ready = step_ready(&publish, upto, layers, step, &source.extent);
            let filled_all = matches!(source.extent, Extent::Ready(Ready { end: Some(_), .. }));
            if !filled_all {
                self.fill_to(&transfer, &mut source, ready)?;
            }
            let first = step == 1;
            let request = PublishRequest {
                transfer: transfer.clone(),
                pages: first.then(|| source.lists.clone()),
                ready,
                metadata: publish
                    .metadata
                    .as_ref()
                    .filter(|_| first)
                    .map(|text| text.clone().into_bytes()),
                serves: publish.serves,
            };
            let at_us = now_us();
            match self.rank.publish(request).await {
                Ok(publication) => {
                    self.teller.tell(&Told::Published {
                        transfer: transfer.id.clone(),
                        attempt: transfer.attempt,
                        step,
                        of: publish.steps.max(1),
                        tokens: ready.end.unwrap_or(ready.tokens.max(ready.front_tokens)),
                        last: ready.end.is_some(),
                        at_us,
                    })?;
                    if !source.followed {
                        source.followed = true;
                        self.open += 1;
                        let (ends, transfer) = (self.ends.clone(), transfer.clone());
                        tokio::spawn(async move {
                            let result = publication.ended().await;
                            // The worker is gone only when the process ends.
                            let _ = ends.send(End {
                                transfer,
                                side: Side::Publish,
                                result,
                                at_us: now_us(),
                            });
                        });
                    }
                }
                Err(error) => {
                    if !source.followed {
                        self.reuse(&source.lists)?;
                    } else {
                        self.sources.insert(transfer, source);
                    }
                    return self.answered("publish", Err(error));
                }
            }
            if step < publish.steps && publish.pause_ms > 0 {
                tokio::time::sleep(Duration::from_millis(publish.pause_ms)).await;
            }
        }
        self.sources.insert(transfer, source);
        Ok(())
    }

    async fn fetch(&mut self, fetch: Fetch) -> anyhow::Result<()> {
        let transfer = TransferId {
            id: fetch.transfer.clone(),
            attempt: fetch.attempt,
        };
        let lists = match self.pages(&fetch.transfer, fetch.pages.as_deref(), fetch.to) {
            Ok(lists) => lists,
            Err(error) => return self.error("fetch", None, format!("{error:#}"), Vec::new()),
        };
        let filling = Filling::new(&fetch.transfer, fetch.attempt, fetch.generation);
        let nonce = self.next_nonce();
        let poison = Arc::new(Content {
            nonce,
            filling,
            extent: Extent::Nothing,
        });
        if let Err(error) = self.pool.give(&lists, &poison, None) {
            return self.error("fetch", None, format!("{error:#}"), Vec::new());
        }
        self.pool.in_flight(&lists)?;
        let at_us = now_us();
        let request = FetchRequest {
            source: fetch.source.clone(),
            transfer: transfer.clone(),
            pages: lists.clone(),
            tokens: TokenRange {
                from: fetch.from,
                to: fetch.to,
            },
            least: fetch.least.unwrap_or(fetch.to),
        };
        match self.rank.fetch(request).await {
            Ok(fetching) => {
                self.teller.tell(&Told::Fetching {
                    transfer: transfer.id.clone(),
                    attempt: transfer.attempt,
                    from: fetch.from,
                    to: fetch.to,
                    at_us,
                })?;
                self.open += 1;
                let (ends, named, teller) = (self.ends.clone(), transfer.clone(), self.teller);
                tokio::spawn(async move {
                    let result = tell_progress(&fetching, &named, teller).await;
                    let at_us = now_us();
                    // The worker is gone only when the process ends.
                    let _ = ends.send(End {
                        transfer: named,
                        side: Side::Fetch,
                        result,
                        at_us,
                    });
                });
                let fetched = Fetched {
                    lists,
                    filling,
                    from: fetch.from,
                    nonce,
                    verify: fetch.verify,
                };
                self.fetches.insert(transfer, fetched);
                Ok(())
            }
            Err(error) => {
                // Refused at once: every page must still be as it was given.
                self.pool.expect(&lists, &poison)?;
                self.verify(&transfer, &lists)?;
                self.free.give_back(&lists);
                self.answered("fetch", Err(error))
            }
        }
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

    fn fetch_ended(&mut self, end: End, fetched: Fetched) -> anyhow::Result<()> {
        let Fetched {
            lists,
            filling,
            from,
            nonce,
            verify,
        } = fetched;
        match end.result {
            Ok(delivered) => {
                let range = TokenRange {
                    from,
                    to: delivered.tokens,
                };
                let content = Arc::new(Content {
                    nonce,
                    filling,
                    extent: Extent::Fetched(range),
                });
                self.pool.expect(&lists, &content)?;
                self.unverified.push((end.transfer, lists));
                match verify {
                    When::Now => self.verify_unverified(),
                    When::Later => Ok(()),
                }
            }
            Err(failed) => {
                if failed.cause.code == Code::LinkRefused {
                    // Refused before any payload: every page must still be as it was given.
                    let content = Arc::new(Content {
                        nonce,
                        filling,
                        extent: Extent::Nothing,
                    });
                    self.pool.expect(&lists, &content)?;
                    self.verify(&end.transfer, &lists)?;
                }
                self.reuse(&lists)
            }
        }
    }

    /// Overwrites pages of a settled transfer, so that a byte that lands late, or is sent late, shows.
    fn reuse(&mut self, lists: &PageLists) -> anyhow::Result<()> {
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

    fn verify_unverified(&mut self) -> anyhow::Result<()> {
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

    fn verify(&mut self, transfer: &TransferId, lists: &PageLists) -> anyhow::Result<()> {
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

    fn failed(&mut self, refused: bool) {
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

    fn tried(
        &mut self,
        order: &str,
        act: impl FnOnce(&mut Worker) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match act(self) {
            Ok(()) => Ok(()),
            Err(error) => self.error(order, None, format!("{error:#}"), Vec::new()),
        }
    }

    fn answered(&mut self, order: &str, answer: Result<(), ClientError>) -> anyhow::Result<()> {
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

    fn error(
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

/// Tells how far a fetch is until it ends.
async fn tell_progress(
    fetching: &Fetching,
    transfer: &TransferId,
    teller: Teller,
) -> Result<Delivered, Failed> {
    let mut seen = fetching.progress();
    let mut ended = std::pin::pin!(fetching.ended());
    loop {
        tokio::select! {
            biased;
            result = &mut ended => return result,
            progress = fetching.moved_on(&seen) => {
                if progress == seen {
                    // It ended; the end is at hand.
                    return ended.await;
                }
                let (id, attempt) = (transfer.id.clone(), transfer.attempt);
                let told = Told::Progress { transfer: id, attempt, bytes: progress.bytes, total: progress.total };
                if teller.tell(&told).is_err() {
                    // Nobody listens; the main loop meets the same error and ends the process.
                    return ended.await;
                }
                seen = progress;
            }
        }
    }
}

/// What step `step` of a publish says is ready.
fn step_ready(publish: &Publish, upto: u64, layers: u32, step: u32, before: &Extent) -> Ready {
    let steps = publish.steps.max(1);
    let whole = upto == publish.tokens;
    if step == steps && whole {
        return Ready::complete(publish.tokens);
    }
    let before = match before {
        Extent::Ready(ready) => *ready,
        _ => Ready::default(),
    };
    let share = |of: u64| of * u64::from(step) / u64::from(steps);
    match publish.by {
        _ if step == steps => Ready {
            tokens: upto,
            front_tokens: upto,
            front_layers: 0,
            end: None,
        },
        Growth::Tokens => {
            let tokens = share(upto).max(before.tokens);
            Ready {
                tokens,
                front_tokens: tokens,
                front_layers: 0,
                end: None,
            }
        }
        Growth::Layers => Ready {
            tokens: before.tokens,
            front_tokens: upto,
            front_layers: u32::try_from(share(layers.into())).unwrap_or(layers),
            end: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(steps: u32, by: Growth) -> Publish {
        let Ok(Order::Publish(mut publish)) =
            super::super::script::parse(r#"{"do":"publish","transfer":"a","tokens":100}"#)
        else {
            panic!("does not parse")
        };
        (publish.steps, publish.by) = (steps, by);
        publish
    }

    #[test]
    fn steps_grow_and_end_complete() {
        let none = Extent::Nothing;
        for by in [Growth::Tokens, Growth::Layers] {
            assert_eq!(
                step_ready(&publish(1, by), 100, 32, 1, &none),
                Ready::complete(100)
            );
            assert_eq!(
                step_ready(&publish(4, by), 100, 32, 4, &none),
                Ready::complete(100)
            );
        }
        let ready = step_ready(&publish(4, Growth::Tokens), 100, 32, 3, &none);
        assert_eq!((ready.tokens, ready.end), (75, None));
        let ready = step_ready(&publish(4, Growth::Layers), 100, 32, 1, &none);
        assert_eq!(
            (ready.tokens, ready.front_tokens, ready.front_layers),
            (0, 100, 8)
        );
        assert_eq!(ready.end, None);
    }

    #[test]
    fn a_publish_that_stops_short_is_not_final() {
        let ready = step_ready(&publish(1, Growth::Tokens), 40, 32, 1, &Extent::Nothing);
        assert_eq!((ready.tokens, ready.end), (40, None));
    }
}
