//! The prefill side: fills pages step by step, publishes each step, and follows the publish to its end.

use std::sync::Arc;
use std::time::Duration;

use kvferry_client::{PublishRequest, Side, TransferId};
use kvferry_handshake::{PageLists, Ready};

use super::content::{Content, Extent};
use super::pattern::Filling;
use super::report::Told;
use super::script::{Fill, Growth, Publish};
use super::worker::{End, Worker, now_us};

/// A transfer that this rank is the source of.
pub(crate) struct Source {
    pub(crate) lists: PageLists,
    filling: Filling,
    extent: Extent,
    nonce: u64,
    filled: bool,
    /// Whether a task waits for its end.
    followed: bool,
}

impl Worker {
    /// Draws pages for a prompt and, unless `now` is false, fills all of it.
    pub(crate) fn fill(&mut self, fill: &Fill, now: bool) -> anyhow::Result<TransferId> {
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
        if now && let Err(error) = self.fill_to(&transfer, &mut source, Ready::complete(fill.tokens)) {
            self.free.give_back(&source.lists);
            return Err(error);
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

    pub(crate) async fn publish(&mut self, publish: Publish) -> anyhow::Result<()> {
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
            if !filled_all && let Err(error) = self.fill_to(&transfer, &mut source, ready) {
                self.not_published(transfer, source)?;
                return self.error("publish", None, format!("{error:#}"), Vec::new());
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
                    self.not_published(transfer, source)?;
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

    /// A step failed: pages that nobody was told of are free again; others are, once their transfer ends.
    fn not_published(&mut self, transfer: TransferId, source: Source) -> anyhow::Result<()> {
        if source.followed {
            self.sources.insert(transfer, source);
            return Ok(());
        }
        self.reuse(&source.lists)
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
    use super::super::script::{Order, parse};
    use super::*;

    fn publish(steps: u32, by: Growth) -> Publish {
        let Ok(Order::Publish(mut publish)) = parse(r#"{"do":"publish","transfer":"a","tokens":100}"#) else {
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
