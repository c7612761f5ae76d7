//! Connections that have not shown who they are: a bounded number, of which the oldest gives way.

use std::collections::VecDeque;
use std::future::Future;

use tokio::task::AbortHandle;

/// Tasks that serve them, oldest first. They end with it.
#[derive(Debug)]
pub(crate) struct Crowd {
    most: usize,
    tasks: VecDeque<AbortHandle>,
}

impl Crowd {
    pub(crate) fn new(most: usize) -> Crowd {
        Crowd {
            most,
            tasks: VecDeque::new(),
        }
    }

    /// Serves one more.
    pub(crate) fn admit(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        if self.tasks.len() >= self.most {
            self.tasks.retain(|task| !task.is_finished());
        }
        while self.tasks.len() >= self.most {
            if let Some(oldest) = self.tasks.pop_front() {
                oldest.abort();
            }
        }
        self.tasks.push_back(tokio::spawn(task).abort_handle());
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Alive(Arc<AtomicUsize>, usize);

    impl Drop for Alive {
        fn drop(&mut self) {
            self.0.fetch_add(self.1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_oldest_gives_way_and_the_rest_end_with_it() {
        let ended = Arc::new(AtomicUsize::new(0));
        let mut crowd = Crowd::new(2);
        let mut idle = |weight| {
            let alive = Alive(Arc::clone(&ended), weight);
            crowd.admit(async move {
                let _alive = alive;
                std::future::pending().await
            });
        };
        idle(1);
        idle(10);
        idle(100);
        tokio::task::yield_now().await;
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        drop(crowd);
        tokio::task::yield_now().await;
        assert_eq!(ended.load(Ordering::Relaxed), 111);
    }
}
