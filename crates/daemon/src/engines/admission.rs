//! Who may connect, and who gives way when there are too many.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_broker::SessionId;
use kvferry_control::Fault;
use kvferry_handshake::Code;

use super::Seat;
use crate::config::Limits;
use crate::drain::shutting_down;

/// The connections that there are, oldest first.
#[derive(Debug)]
pub(crate) struct Admission {
    allowed: Vec<u32>,
    limits: Limits,
    seats: Mutex<BTreeMap<SessionId, Arc<Seat>>>,
    closed: AtomicBool,
}

impl Admission {
    /// `allowed` users, root, and the daemon's own may connect.
    pub(crate) fn new(mut allowed: Vec<u32>, limits: Limits) -> Admission {
        allowed.extend([0, rustix::process::geteuid().as_raw()]);
        Admission {
            allowed,
            limits,
            seats: Mutex::new(BTreeMap::new()),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn check_user(&self, uid: u32) -> Result<(), Fault> {
        if self.allowed.contains(&uid) {
            return Ok(());
        }
        Err(Fault::new(
            Code::PeerCredentials,
            format!(
                "user {uid} is not allowed; add it to allow_users in the daemon's configuration, or run the engine as \
                 one of {}",
                self.allowed
                    .iter()
                    .map(u32::to_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        ))
    }

    /// From now on nobody is taken in.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Takes a connection in. Where there are too many, the oldest that has not attached gives way.
    pub(crate) fn take_in(&self, seat: &Arc<Seat>) -> Result<(), Fault> {
        if self.closed.load(Ordering::Acquire) {
            return Err(shutting_down());
        }
        let mut seats = self.seats();
        let of_user = seats.values().filter(|other| other.uid == seat.uid).count();
        if of_user >= self.limits.connections_per_user {
            let name = format!("connections of user {} (limits.connections_per_user)", seat.uid);
            give_way(&mut seats, |other| other.uid == seat.uid, &name, of_user)?;
        } else if seats.len() >= self.limits.connections {
            let count = seats.len();
            give_way(&mut seats, |_| true, "connections (limits.connections)", count)?;
        }
        seats.insert(seat.session, Arc::clone(seat));
        Ok(())
    }

    pub(crate) fn leave(&self, session: SessionId) {
        self.seats().remove(&session);
    }

    pub(crate) fn count(&self) -> usize {
        self.seats().len()
    }

    fn seats(&self) -> MutexGuard<'_, BTreeMap<SessionId, Arc<Seat>>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn give_way(
    seats: &mut BTreeMap<SessionId, Arc<Seat>>,
    of: impl Fn(&Seat) -> bool,
    what: &str,
    count: usize,
) -> Result<(), Fault> {
    let idle = seats
        .values()
        .find(|seat| of(seat) && !seat.attached())
        .map(|seat| seat.session);
    let Some(seat) = idle.and_then(|session| seats.remove(&session)) else {
        return Err(Fault::new(
            Code::OverLimit,
            format!("there are {count} {what}, all attached; raise the limit"),
        ));
    };
    seat.outbox.cut(Fault::new(
        Code::OverLimit,
        format!("there are {count} {what}; {seat}, the oldest that has not attached, gives way"),
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(session: u64, uid: u32) -> Arc<Seat> {
        Arc::new(Seat::new(SessionId(session), uid, None, 1000))
    }

    fn admission() -> Admission {
        let limits = Limits {
            connections: 3,
            connections_per_user: 2,
            ..Limits::default()
        };
        Admission::new(vec![7], limits)
    }

    async fn is_cut(seat: &Seat) -> bool {
        let taken = tokio::time::timeout(std::time::Duration::ZERO, seat.outbox.take()).await;
        matches!(taken, Ok(Err(fault)) if fault.code == Code::OverLimit)
    }

    #[test]
    fn users_are_allowed_by_name() {
        let admission = admission();
        admission.check_user(7).unwrap();
        admission.check_user(0).unwrap();
        let fault = admission.check_user(8).unwrap_err();
        assert_eq!(fault.code, Code::PeerCredentials);
        assert!(fault.message.starts_with("user 8 is not allowed"), "{fault}");
    }

    #[tokio::test]
    async fn the_oldest_unattached_connection_of_the_same_user_gives_way() {
        let admission = admission();
        let (other, first, second, third) = (seat(1, 6), seat(2, 7), seat(3, 7), seat(4, 7));
        for seat in [&other, &first, &second] {
            admission.take_in(seat).unwrap();
        }
        first.set_attached(true);
        admission.take_in(&third).unwrap();
        assert!(is_cut(&second).await);
        assert!(!is_cut(&first).await && !is_cut(&other).await && !is_cut(&third).await);
        assert_eq!(admission.count(), 3);
        third.set_attached(true);
        let fault = admission.take_in(&seat(5, 7)).unwrap_err();
        assert_eq!(fault.code, Code::OverLimit);
        assert!(fault.message.contains("limits.connections_per_user"), "{fault}");
    }

    #[test]
    fn once_it_is_closed_nobody_is_taken_in() {
        let admission = admission();
        admission.close();
        let fault = admission.take_in(&seat(1, 7)).unwrap_err();
        assert_eq!(fault.code, Code::Shutdown);
        assert!(fault.code.can_retry() && admission.count() == 0);
    }

    #[tokio::test]
    async fn the_bound_on_all_connections_holds_across_users() {
        let admission = admission();
        let seats: Vec<_> = (1..=3).map(|n| seat(n, 10 + u32::try_from(n).unwrap())).collect();
        for seat in &seats {
            admission.take_in(seat).unwrap();
        }
        admission.take_in(&seat(4, 20)).unwrap();
        assert!(is_cut(&seats[0]).await);
        admission.leave(SessionId(2));
        admission.take_in(&seat(5, 21)).unwrap();
        assert!(!is_cut(&seats[2]).await);
    }
}
