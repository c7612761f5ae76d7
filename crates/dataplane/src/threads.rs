//! The data plane's threads: named, counted and joined.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::thread::{Builder, JoinHandle, ThreadId};

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

    /// Joins all threads, and starts none any more. Whoever calls has told them to end.
    pub(crate) fn join_all(&self) {
        loop {
            let handle = {
                let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
                state.closed = true;
                let Some(id) = state.handles.keys().next().copied() else {
                    return;
                };
                state.handles.remove(&id)
            };
            if let Some(handle) = handle {
                join(handle);
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).handles.len()
    }
}

/// A thread that drops the last handle of the data plane cannot wait for itself.
fn join(handle: JoinHandle<()>) {
    if handle.thread().id() != std::thread::current().id() && handle.join().is_err() {
        tracing::error!("a thread of the data plane met a defect");
    }
}
