//! The data plane's threads: named, counted and joined.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// How often it is looked whether a thread that is waited for has ended.
const LOOK: Duration = Duration::from_millis(1);

/// Running threads, and those that ended and are not joined.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    handles: HashMap<ThreadId, JoinHandle<()>>,
    ended: Vec<ThreadId>,
    closed: bool,
}

impl Threads {
    /// Starts a thread, unless all are being joined.
    pub(crate) fn spawn(&self, name: &str, life: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Held while the thread starts, so that it is listed before it can end.
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        if state.closed {
            return Err(io::Error::other("the data plane is shutting down"));
        }
        let handle = Builder::new().name(name.to_owned()).spawn(life)?;
        state.handles.insert(handle.thread().id(), handle);
        Ok(())
    }

    /// The calling thread is about to end; [`Threads::reap`] may join it.
    pub(crate) fn ending(&self) {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        state.ended.push(std::thread::current().id());
    }

    /// Joins the threads that said that they end.
    pub(crate) fn reap(&self) {
        let handles: Vec<_> = {
            let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
            let ended = std::mem::take(&mut state.ended);
            ended.iter().filter_map(|id| state.handles.remove(id)).collect()
        };
        for handle in handles {
            join(handle);
        }
    }

    /// Joins all threads, and starts none any more. Whoever calls has told them to end. One that has not after `limit` is left
    /// behind: it waits for an engine's memory, in a system call that the end of the daemon's process ends. Tells how many.
    pub(crate) fn join_all(&self, limit: Duration) -> usize {
        let began = Instant::now();
        let mut left = 0;
        loop {
            let handle = {
                let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
                state.closed = true;
                let Some(id) = state.handles.keys().next().copied() else {
                    return left;
                };
                state.handles.remove(&id)
            };
            let Some(handle) = handle else { continue };
            while !handle.is_finished() && !is_current(&handle) && began.elapsed() < limit {
                std::thread::sleep(LOOK);
            }
            if handle.is_finished() || is_current(&handle) {
                join(handle);
            } else {
                let name = handle.thread().name().unwrap_or_default();
                tracing::warn!(
                    name,
                    "a thread does not end: it waits for an engine's memory; it is left behind"
                );
                left += 1;
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).handles.len()
    }
}

/// A thread that drops the last handle of the data plane cannot wait for itself.
fn join(handle: JoinHandle<()>) {
    if !is_current(&handle) && handle.join().is_err() {
        tracing::error!("a thread of the data plane met a defect");
    }
}

fn is_current(handle: &JoinHandle<()>) -> bool {
    handle.thread().id() == std::thread::current().id()
}

#[cfg(test)]
mod tests {
    use super::Threads;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_thread_that_does_not_end_is_left_behind_and_the_others_are_joined() {
        let threads = Threads::default();
        let (release, held) = mpsc::channel::<()>();
        let (done, seen) = mpsc::channel();
        threads
            .spawn("held", move || {
                let _ = held.recv();
            })
            .unwrap();
        for _ in 0..4 {
            let done = done.clone();
            threads.spawn("ends", move || done.send(()).unwrap()).unwrap();
        }
        for _ in 0..4 {
            seen.recv().unwrap();
        }
        // The four have a moment to be gone after their last word.
        assert_eq!(threads.join_all(Duration::from_secs(1)), 1);
        assert_eq!(threads.count(), 0);
        threads.spawn("late", || {}).unwrap_err();
        drop(release);
    }
}
