//! One connection of an engine, as its session, the driver and the admission share it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_broker::SessionId;
use kvferry_control::{Answer, Event, Fault, MAX_FRAME, MAX_UNATTACHED_FRAME, Response};
use kvferry_dataplane::EngineProcess;
use kvferry_handshake::{Code, encode};

use crate::outbox::Outbox;

/// A connection.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) session: SessionId,
    pub(crate) uid: u32,
    /// `None` where its process could not be told; then it cannot register process memory.
    pub(crate) process: Option<Arc<EngineProcess>>,
    pub(crate) outbox: Outbox,
    attached: AtomicBool,
}

impl Seat {
    pub(crate) fn new(
        session: SessionId,
        uid: u32,
        process: Option<Arc<EngineProcess>>,
        queue_bytes: usize,
    ) -> Seat {
        Seat {
            session,
            uid,
            process,
            outbox: Outbox::new(queue_bytes),
            attached: AtomicBool::new(false),
        }
    }

    pub(crate) fn attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }

    pub(crate) fn set_attached(&self, attached: bool) {
        self.attached.store(attached, Ordering::Release);
    }

    /// Longest frame that is accepted now.
    pub(crate) fn frame_limit(&self) -> usize {
        if self.attached() {
            MAX_FRAME
        } else {
            MAX_UNATTACHED_FRAME
        }
    }

    pub(crate) fn answer(&self, number: u64, answer: Result<Answer, Fault>) {
        self.say(&Response::Answer { number, answer });
    }

    pub(crate) fn tell(&self, event: Event) {
        self.say(&Response::Event(event));
    }

    fn say(&self, response: &Response) {
        let frame = match encode(response) {
            Ok(frame) => frame,
            Err(error) => return self.outbox.cut(Fault::new(Code::Internal, error.to_string())),
        };
        if let Err(overflow) = self.outbox.push(frame) {
            self.outbox.cut(Fault::new(
                Code::OverLimit,
                format!(
                    "{self} leaves {} bytes of answers and events unread, of {} that may wait \
                     (limits.engine_queue_bytes); it is disconnected",
                    overflow.waiting, overflow.limit
                ),
            ));
        }
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.process.as_ref().map_or(0, |process| process.pid());
        write!(
            f,
            "connection {} (user {}, process {pid})",
            self.session.0, self.uid
        )
    }
}
