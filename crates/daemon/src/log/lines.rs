//! Lines that wait to be written.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of lines that wait.
const ROOM: usize = 1 << 20;
/// How long to rest before a write is tried again that would have waited.
const REST: Duration = Duration::from_millis(20);

/// Lines that were dropped, in this process, since they found no room.
static CROWDED_OUT: AtomicU64 = AtomicU64::new(0);
/// Lines that could not be written.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);

/// Lines that nobody can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loss {
    /// Too many waited: the reader is slow, or stopped.
    pub(crate) no_room: u64,
    /// The write failed: the reader is gone, or the disk is full.
    pub(crate) not_written: u64,
}

/// What this process has lost.
pub(crate) fn lost() -> Loss {
    Loss {
        no_room: CROWDED_OUT.load(Ordering::Relaxed),
        not_written: UNWRITTEN.load(Ordering::Relaxed),
    }
}

/// The queue. Its lock is never held while something is written.
#[derive(Debug, Default)]
pub(super) struct Lines {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Of what waits.
    bytes: usize,
    /// One is being written.
    writing: bool,
    /// Dropped, and not spoken of yet.
    dropped: u64,
}

impl Lines {
    /// Starts the thread that writes; it ends with the process.
    pub(super) fn start(out: impl Write + Send + 'static) -> io::Result<Arc<Lines>> {
        let lines = Arc::new(Lines::default());
        let mine = Arc::clone(&lines);
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || mine.write_all_to(out))?;
        Ok(lines)
    }

    /// Adds a line, or drops it where there is no room.
    pub(super) fn push(&self, line: &[u8]) {
        let mut state = self.state();
        if state.bytes + line.len() > ROOM {
            state.dropped += 1;
            drop(state);
            CROWDED_OUT.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.bytes += line.len();
        state.waiting.push_back(line.to_vec());
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until everything is written, but no longer than `patience`.
    pub(super) fn finish(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = self.state();
        while state.writing || !state.waiting.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn write_all_to(&self, mut out: impl Write) {
        loop {
            let line = self.take();
            if write(&mut out, &line).is_err() {
                UNWRITTEN.fetch_add(1, Ordering::Relaxed);
            }
            let dropped = self.written();
            if dropped > 0 {
                tracing::warn!(
                    dropped,
                    "log lines were dropped: whoever reads the log is too slow, or was stopped"
                );
            }
        }
    }

    fn take(&self) -> Vec<u8> {
        let mut state = self.state();
        loop {
            if let Some(line) = state.waiting.pop_front() {
                state.bytes -= line.len();
                state.writing = true;
                return line;
            }
            let changed = self.changed.wait(state);
            state = changed.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A line is written; how many were dropped, when it is time to say so: not while it is still crowded.
    fn written(&self) -> u64 {
        let mut state = self.state();
        state.writing = false;
        let calm = state.bytes < ROOM / 2;
        let dropped = if calm {
            std::mem::take(&mut state.dropped)
        } else {
            0
        };
        drop(state);
        self.changed.notify_all();
        dropped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes all of `line`; waits where standard error was made non-blocking by whoever shares it.
fn write(out: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match out.write(line) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => line = line.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(REST),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Writes each line once it may.
    struct Slow {
        may: mpsc::Receiver<()>,
        seen: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            // Whoever lets it write may have gone: then it may always.
            let _ = self.may.recv();
            let _ = self.seen.send(line.to_vec());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_the_rest_comes_in_order() {
        let (let_go, may) = mpsc::channel();
        let (seen, lines) = mpsc::channel();
        let queue = Lines::start(Slow { may, seen }).unwrap();
        let line = |n: u64| {
            let mut line = n.to_be_bytes().to_vec();
            line.resize(1000, 0);
            line
        };
        let sent = 3 * ROOM as u64 / 1000;
        let before = lost().no_room;
        for n in 0..sent {
            queue.push(&line(n));
        }
        let dropped = lost().no_room - before;
        // Nothing is written yet, so it does not wait for ever.
        queue.finish(Duration::ZERO);
        drop(let_go);
        queue.finish(Duration::from_secs(20));
        let seen: Vec<Vec<u8>> = lines.try_iter().collect();
        assert_eq!(seen.len() as u64 + dropped, sent);
        assert!(dropped >= sent / 2, "{dropped} of {sent}");
        for (n, seen) in (0..).zip(&seen) {
            assert_eq!(*seen, line(n));
        }
    }

    #[test]
    fn a_write_that_fails_is_counted_and_the_next_is_tried() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let before = lost().not_written;
        let queue = Lines::start(Gone).unwrap();
        queue.push(b"one");
        queue.push(b"two");
        queue.finish(Duration::from_secs(20));
        assert_eq!(lost().not_written - before, 2);
    }

    #[test]
    fn a_write_that_would_wait_is_tried_again() {
        struct Busy(u32, mpsc::Sender<u8>);
        impl Write for Busy {
            fn write(&mut self, line: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                if self.0 % 2 == 1 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let _ = self.1.send(line[0]);
                Ok(1)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (seen, bytes) = mpsc::channel();
        write(&mut Busy(0, seen), b"abc").unwrap();
        assert_eq!(bytes.try_iter().collect::<Vec<u8>>(), b"abc");
    }
}
