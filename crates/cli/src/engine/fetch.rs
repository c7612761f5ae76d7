//! The decode side: poisons pages, fetches into them, follows the fetch to its end, and says what must be there then.

use std::sync::Arc;

use kvferry_client::{Delivered, Failed, FetchRequest, Fetching, Side, TransferId};
use kvferry_handshake::{Code, PageLists, TokenRange};

use super::content::{Content, Extent};
use super::pattern::Filling;
use super::report::{Teller, Told};
use super::script::{Fetch, When};
use super::worker::{End, Worker, now_us};

/// A fetch under way.
pub(crate) struct Fetched {
    lists: PageLists,
    filling: Filling,
    from: u64,
    nonce: u64,
    verify: When,
}

impl Worker {
    pub(crate) async fn fetch(&mut self, fetch: Fetch) -> anyhow::Result<()> {
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
            self.free.give_back(&lists);
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

    pub(crate) fn fetch_ended(&mut self, end: End, fetched: Fetched) -> anyhow::Result<()> {
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
