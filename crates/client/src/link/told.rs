//! What the daemon says: answers to calls, and events.

use std::sync::Arc;

use kvferry_control::{Answer, Event, Response, Side};
use kvferry_handshake::Code;

use super::Link;
use crate::calls::{Pending, Region, TransferKey};
use crate::transfer::{Delivered, Failed};
use crate::{ClientError, Fault, Notice, Registered};

impl Link {
    pub(super) fn response(&mut self, response: Response) {
        match response {
            Response::Answer { number, answer } => self.answer(number, answer),
            Response::Event(event) => self.event(event),
            Response::Hello(_) => tracing::warn!("the daemon greeted twice"),
        }
    }

    pub(super) fn answer(&mut self, number: u64, answer: Result<Answer, Fault>) {
        let Some(pending) = self.pending.remove(&number) else {
            tracing::warn!(number, "the daemon answered a call that is not open");
            return;
        };
        let answer = answer.map_err(ClientError::Refused);
        // Whoever asked may have gone; what the daemon did is remembered all the same.
        match pending {
            Pending::Call { reply } => drop(reply.send(answer)),
            Pending::Restore { region } => self.restore_answered(region, answer),
            Pending::Attach { attachment, reply } => {
                if answer.is_ok() {
                    self.attachment = Some(*attachment);
                    self.attached = true;
                }
                let _ = reply.send(answer.map(drop));
            }
            Pending::Register {
                region,
                memory,
                reply,
            } => {
                let registered = answer.and_then(|answer| match answer {
                    Answer::Registered { generation, paths } => Ok(Registered { generation, paths }),
                    _ => Err(wrong_answer("register")),
                });
                if let Ok(Registered { generation, .. }) = registered {
                    let held = true;
                    self.regions.insert(
                        region,
                        Region {
                            memory,
                            generation,
                            held,
                        },
                    );
                }
                let _ = reply.send(registered);
            }
            Pending::Unregister { region, reply } => {
                if answer.is_ok() {
                    self.regions.remove(&region);
                }
                let _ = reply.send(answer.map(drop));
            }
            Pending::Transfer {
                transfer,
                state,
                reply,
            } => {
                let open = answer.is_ok() || state.borrow().accepted;
                let ended = state.borrow().end.is_some();
                if open && !ended {
                    state.send_modify(|state| state.accepted = true);
                    self.transfers.insert(transfer, Arc::clone(&state));
                } else if !open {
                    self.transfers.remove(&transfer);
                }
                let _ = reply.send(answer.map(|_| state.subscribe()));
            }
        }
    }

    fn event(&mut self, event: Event) {
        match &event {
            Event::Matched { transfer, engine, .. } => {
                if let Some(state) = self.transfers.get(&(Side::Publish, transfer.clone())) {
                    state.send_modify(|state| state.progress.engine = Some(engine.clone()));
                }
            }
            Event::Progress {
                side,
                transfer,
                bytes,
                total,
            } => {
                if let Some(state) = self.transfers.get(&(*side, transfer.clone())) {
                    state.send_modify(|state| {
                        state.progress.bytes = *bytes;
                        state.progress.total = *total;
                    });
                }
            }
            Event::Delivered {
                side,
                transfer,
                tokens,
                metadata,
                report,
            } => self.end(
                (*side, transfer.clone()),
                Ok(Delivered {
                    tokens: *tokens,
                    metadata: metadata.clone(),
                    report: report.clone(),
                }),
            ),
            Event::Failed {
                side,
                transfer,
                cause,
                report,
            } => self.end(
                (*side, transfer.clone()),
                Err(Failed {
                    cause: cause.clone(),
                    report: report.clone(),
                }),
            ),
            Event::Detached { .. } => {
                self.detached();
                self.presence.send_modify(|presence| presence.up = false);
            }
            Event::Refused { .. } => {}
        }
        let _ = self.notices.send(Notice::Event(event));
    }

    fn end(&mut self, transfer: TransferKey, end: Result<Delivered, Failed>) {
        if let Some(state) = self.transfers.remove(&transfer) {
            state.send_modify(|state| state.end = Some(end));
        }
    }
}

pub(crate) fn wrong_answer(call: &str) -> ClientError {
    ClientError::Refused(Fault::new(
        Code::ProtocolViolation,
        format!("the daemon answered {call} with something else"),
    ))
}
