//! What may take a while, beside the threads that serve everybody: each on a thread of its own.
//!
//! The runtime's own pool for such work panics where the system gives no thread; here that is an answer. And a thread
//! that waits for an engine's memory for ever holds up neither the others nor the daemon's end.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;
use std::thread::Builder;

use kvferry_control::Fault;
use kvferry_handshake::Code;
use tokio::sync::oneshot;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Undone {
    /// Nothing was begun.
    #[error(
        "the system gives kvferryd no further thread ({0}); try again, or raise the limit it is at: of threads (RLIMIT_NPROC; \
         pids.max of its cgroup; TasksMax= of its service) or of memory"
    )]
    NoThread(io::Error),
    /// It panicked, which is logged.
    #[error("kvferryd met a defect, which its log tells; please report it")]
    Defect,
}

impl Undone {
    fn code(&self) -> Code {
        match self {
            Undone::NoThread(_) => Code::OverLimit,
            Undone::Defect => Code::Internal,
        }
    }

    /// As an engine or a peer is told it; `what` was to be done.
    pub(crate) fn fault(&self, what: &str) -> Fault {
        Fault::new(self.code(), format!("{what}: {self}"))
    }
}

/// Does `work` on a thread of its own.
pub(crate) async fn aside<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Undone> {
    let (done, wait) = oneshot::channel();
    Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Nobody may wait for it any more.
            let _ = done.send(work());
        })
        .map_err(Undone::NoThread)?;
    wait.await.map_err(|_| Undone::Defect)
}

/// What `life` ends with; `None` where it panicked, which is logged. What it held is dropped then.
pub(crate) async fn caught<F: Future>(life: F) -> Option<F::Output> {
    let mut life = Box::pin(life);
    std::future::poll_fn(move |context| {
        // After a panic it is not polled any more, so that nothing that is half done is seen.
        match catch_unwind(AssertUnwindSafe(|| life.as_mut().poll(context))) {
            Ok(polled) => polled.map(Some),
            Err(_) => Poll::Ready(None),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_answer_and_what_was_held_is_dropped() {
        assert_eq!(aside("sum", || 1 + 1).await.unwrap(), 2);
        let undone = aside("panics", || panic!("at once")).await.unwrap_err();
        assert_eq!(undone.fault("it").code, Code::Internal);

        let (held, dropped) = oneshot::channel::<()>();
        let life = async move {
            let _held = held;
            tokio::task::yield_now().await;
            panic!("later");
        };
        assert_eq!(caught(life).await, None::<()>);
        dropped.await.unwrap_err();
        assert_eq!(caught(async { 3 }).await, Some(3));
    }
}
