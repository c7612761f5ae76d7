//! What waits to be written to one engine or peer, bounded.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry_control::Fault;
use kvferry_handshake::WireError;
use tokio::sync::Notify;

/// Frames that wait for a socket. Whoever fills it never waits: a reader that lets it overflow is cut.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    wake: Notify,
    limit: usize,
}

/// A frame that waits: written, or to be written by whoever takes it.
pub(crate) struct Parcel {
    size: usize,
    frame: Box<dyn FnOnce() -> Result<Vec<u8>, WireError> + Send>,
}

impl Parcel {
    /// A frame of about `size` bytes that takes a while to write: whoever pushes it has no time for that.
    pub(crate) fn unwritten(
        size: usize,
        frame: impl FnOnce() -> Result<Vec<u8>, WireError> + Send + 'static,
    ) -> Parcel {
        Parcel {
            size,
            frame: Box::new(frame),
        }
    }
}

impl From<Vec<u8>> for Parcel {
    fn from(frame: Vec<u8>) -> Parcel {
        Parcel {
            size: frame.len(),
            frame: Box::new(move || Ok(frame)),
        }
    }
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parcel of {} bytes", self.size)
    }
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Parcel>,
    bytes: usize,
    /// Nothing more comes; what waits is still taken.
    end: Option<Fault>,
    /// What waited is dropped.
    cut: bool,
}

/// More waits than may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow {
    /// Bytes that wait.
    pub(crate) waiting: usize,
    /// Most bytes.
    pub(crate) limit: usize,
}

impl Outbox {
    pub(crate) fn new(limit: usize) -> Outbox {
        Outbox {
            state: Mutex::new(State::default()),
            wake: Notify::new(),
            limit,
        }
    }

    /// Adds a frame. A frame that is longer than the whole bound passes when nothing else waits.
    pub(crate) fn push(&self, frame: impl Into<Parcel>) -> Result<(), Overflow> {
        let parcel = frame.into();
        let mut state = self.state();
        if state.end.is_some() {
            return Ok(());
        }
        if state.bytes > 0 && state.bytes + parcel.size > self.limit {
            return Err(Overflow {
                waiting: state.bytes,
                limit: self.limit,
            });
        }
        // An empty frame counts, too: it occupies memory.
        state.bytes += parcel.size.max(64);
        state.frames.push_back(parcel);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Ends it: what waits is dropped, and the one who writes learns why.
    pub(crate) fn cut(&self, why: Fault) {
        let mut state = self.state();
        state.frames = VecDeque::new();
        state.bytes = 0;
        state.end.get_or_insert(why);
        state.cut = true;
        drop(state);
        self.wake.notify_one();
    }

    /// Until it is cut. For whoever waits for something else than the next frame.
    pub(crate) async fn is_cut(&self) -> Fault {
        loop {
            {
                let state = self.state();
                if let (true, Some(why)) = (state.cut, &state.end) {
                    return why.clone();
                }
            }
            self.wake.notified().await;
        }
    }

    /// Ends it once what waits is taken.
    pub(crate) fn finish(&self, why: Fault) {
        self.state().end.get_or_insert(why);
        self.wake.notify_one();
    }

    /// The next frame; waits for one. An error once it has ended. One task takes.
    pub(crate) async fn take(&self) -> Result<Vec<u8>, Fault> {
        loop {
            let next = {
                let mut state = self.state();
                let next = state.frames.pop_front();
                match (&next, &state.end) {
                    (Some(parcel), _) => state.bytes -= parcel.size.max(64),
                    (None, Some(why)) => return Err(why.clone()),
                    (None, None) => {}
                }
                next
            };
            match next.map(|parcel| (parcel.frame)()) {
                Some(Ok(frame)) => return Ok(frame),
                Some(Err(error)) => tracing::error!(%error, "a message cannot be written"),
                None => self.wake.notified().await,
            }
        }
    }

    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.state().bytes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::Code;

    use super::*;

    #[tokio::test]
    async fn it_overflows_at_its_bound_and_not_before() {
        let outbox = Outbox::new(300);
        outbox.push(vec![1; 200]).unwrap();
        outbox.push(vec![2; 100]).unwrap();
        assert_eq!(
            outbox.push(vec![3; 1]),
            Err(Overflow {
                waiting: 300,
                limit: 300
            })
        );
        assert_eq!(outbox.take().await.unwrap(), vec![1; 200]);
        outbox.push(vec![3; 150]).unwrap();
        assert_eq!(outbox.take().await.unwrap(), vec![2; 100]);
        assert_eq!(outbox.take().await.unwrap(), vec![3; 150]);
        assert_eq!(outbox.waiting(), 0);
        outbox.push(vec![4; 1000]).unwrap();
    }

    #[tokio::test]
    async fn many_empty_frames_overflow_too() {
        let outbox = Outbox::new(6400);
        let pushed = (0..1000).take_while(|_| outbox.push(Vec::new()).is_ok()).count();
        assert!(pushed <= 101, "{pushed}");
    }

    #[tokio::test]
    async fn a_frame_is_written_when_it_is_taken() {
        let outbox = Outbox::new(300);
        let long = |wrong: bool| {
            Parcel::unwritten(150, move || match wrong {
                true => Err(WireError::TooLong { len: 2, most: 1 }),
                false => Ok(vec![7; 140]),
            })
        };
        outbox.push(long(true)).unwrap();
        outbox.push(long(false)).unwrap();
        assert!(
            outbox.push(long(false)).is_err(),
            "it counts before it is written"
        );
        assert_eq!(
            outbox.take().await.unwrap(),
            vec![7; 140],
            "what cannot be written is left out"
        );
        assert_eq!(outbox.waiting(), 0);
    }

    #[tokio::test]
    async fn what_waits_is_taken_before_a_finish() {
        let outbox = Outbox::new(100);
        outbox.push(vec![1]).unwrap();
        outbox.finish(Fault::new(Code::Shutdown, "end"));
        outbox.push(vec![2]).unwrap();
        assert_eq!(outbox.take().await.unwrap(), vec![1]);
        assert_eq!(outbox.take().await.unwrap_err().code, Code::Shutdown);
    }

    #[tokio::test]
    async fn a_cut_drops_what_waits_and_wakes_the_taker() {
        let outbox = std::sync::Arc::new(Outbox::new(100));
        let taker = tokio::spawn({
            let outbox = std::sync::Arc::clone(&outbox);
            async move { outbox.take().await }
        });
        tokio::task::yield_now().await;
        outbox.cut(Fault::new(Code::Shutdown, "first"));
        outbox.cut(Fault::new(Code::PeerLost, "second"));
        assert_eq!(taker.await.unwrap().unwrap_err().code, Code::Shutdown);
        outbox.push(vec![1]).unwrap();
        assert_eq!(outbox.take().await.unwrap_err().code, Code::Shutdown);
    }
}
