use std::net::{IpAddr, Ipv4Addr};

use super::*;

const QUEUE: usize = 1000;

fn address(name: &str) -> PeerAddress {
    PeerAddress(name.into())
}

fn arrival(incarnation: u64) -> Arrival {
    Arrival {
        incarnation,
        data_host: IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}

fn set(own: &str, incarnation: u64) -> PeerSet {
    PeerSet::new(address(own), incarnation, 3, QUEUE)
}

/// The dial that sending to a peer without a channel asks for.
fn dial(set: &mut PeerSet, now: Instant, peer: &PeerAddress) -> (DialId, Duration) {
    match set.send(now, peer, vec![1]).as_slice() {
        [Change::Dial { dial, after, .. }] => (*dial, *after),
        other => panic!("{other:?}"),
    }
}

fn refusal() -> Fault {
    Fault::new(Code::PeerUnreachable, "no")
}

fn accepted(decision: Decision) -> Ticket {
    match decision {
        Decision::Accept(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

fn is_cut(outbox: &Outbox) -> bool {
    use std::future::Future;
    use std::task::{Context, Poll, Waker};
    let mut take = std::pin::pin!(outbox.take());
    matches!(
        take.as_mut().poll(&mut Context::from_waker(Waker::noop())),
        Poll::Ready(Err(_))
    )
}

#[test]
fn one_dial_serves_all_that_is_sent_meanwhile() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    let (dialled, after) = dial(&mut set, now, &peer);
    assert_eq!(after, Duration::ZERO);
    assert_eq!(set.send(now, &peer, vec![2]), []);
    assert!(set.may_greet(&peer, dialled));
    let (ticket, changes) = set.dialled(&peer, dialled, arrival(2));
    assert_eq!(
        changes,
        [Change::Up {
            peer: peer.clone(),
            arrival: arrival(2)
        }]
    );
    let ticket = ticket.unwrap();
    assert_eq!(set.speaker(ticket.channel), Some((peer.clone(), 2)));
    assert_eq!(set.send(now, &peer, vec![3]), []);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for expected in 1..=3 {
        assert_eq!(runtime.block_on(ticket.outbox.take()).unwrap(), [expected]);
    }
}

/// Both sides dial at once. Whatever order things happen in, one channel is left, and it is the same for both.
#[test]
fn of_two_connections_that_cross_both_sides_keep_the_same() {
    // 0 and 1: a, and b, may greet. 2 and 3: a's greeting reaches b, and b's reaches a.
    for order in [
        [0, 1, 2, 3],
        [0, 1, 3, 2],
        [1, 0, 2, 3],
        [1, 0, 3, 2],
        [0, 2, 1, 3],
        [1, 3, 0, 2],
    ] {
        let now = Instant::now();
        let (a, b) = (address("a:1"), address("b:1"));
        let (mut at_a, mut at_b) = (set("a:1", 1), set("b:1", 2));
        let (dial_a, _) = dial(&mut at_a, now, &b);
        let (dial_b, _) = dial(&mut at_b, now, &a);
        let (mut a_greets, mut b_greets) = (false, false);
        let (mut b_decides, mut a_decides) = (None, None);
        for step in order {
            match step {
                0 => a_greets = at_a.may_greet(&b, dial_a),
                1 => b_greets = at_b.may_greet(&a, dial_b),
                2 if a_greets => b_decides = Some(at_b.called(now, &a, arrival(1)).0),
                3 if b_greets => a_decides = Some(at_a.called(now, &b, arrival(2)).0),
                _ => {}
            }
        }
        let mut channels = 0;
        for (decision, at_dialler, peer, dialled, incarnation) in [
            (b_decides, &mut at_a, &b, dial_a, 2),
            (a_decides, &mut at_b, &a, dial_b, 1),
        ] {
            if let Some(Decision::Accept(_)) = decision {
                let (ticket, _) = at_dialler.dialled(peer, dialled, arrival(incarnation));
                assert!(
                    ticket.is_some(),
                    "{order:?}: accepted, but the dialler does not want it"
                );
                channels += 1;
            }
        }
        assert_eq!(channels, 1, "{order:?}");
        assert_eq!((at_a.open_channels(), at_b.open_channels()), (1, 1), "{order:?}");
    }
}

#[test]
fn a_dial_that_failed_is_told_once_and_paused_for_longer_each_time() {
    let (mut set, peer, mut now) = (set("a:1", 1), address("b:1"), Instant::now());
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let (dialled, after) = dial(&mut set, now, &peer);
        pauses.push(after);
        now += after;
        let down = set.dial_failed(now, &peer, dialled, refusal());
        assert_eq!(
            down,
            [Change::Down {
                peer: peer.clone(),
                cause: refusal()
            }]
        );
        assert_eq!(set.dial_failed(now, &peer, dialled, refusal()), []);
    }
    assert_eq!(pauses[0], Duration::ZERO);
    assert!(
        pauses
            .windows(2)
            .all(|pair| pair[0] < pair[1] || pair[1] == LONGEST_PAUSE),
        "{pauses:?}"
    );
    assert_eq!(pauses[7], LONGEST_PAUSE);
    assert_eq!(set.states(), [(peer, "peer_unreachable")]);
}

#[test]
fn a_restarted_peer_takes_its_old_channels_place() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    let (dialled, _) = dial(&mut set, now, &peer);
    let old = set.dialled(&peer, dialled, arrival(2)).0.unwrap();
    let (decision, changes) = set.called(now, &peer, arrival(3));
    let new = accepted(decision);
    assert!(
        matches!(&changes[..], [Change::Down { cause, .. }, Change::Up { arrival, .. }]
        if cause.code == Code::PeerLost && arrival.incarnation == 3)
    );
    assert!(is_cut(&old.outbox));
    assert_eq!(set.speaker(old.channel), None);
    assert_eq!(set.speaker(new.channel), Some((peer.clone(), 3)));
    // The end of the old one is no news.
    assert_eq!(set.down(now, old.channel, refusal()), []);
    assert_eq!(set.open_channels(), 1);
}

#[test]
fn a_peer_that_lost_its_own_connection_may_open_another() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    let first = accepted(set.called(now, &peer, arrival(2)).0);
    let (decision, changes) = set.called(now, &peer, arrival(2));
    let second = accepted(decision);
    assert_eq!(changes.len(), 2);
    assert!(is_cut(&first.outbox) && !is_cut(&second.outbox));
}

#[test]
fn a_crossed_greeting_of_the_same_life_is_a_duplicate() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    let (dialled, _) = dial(&mut set, now, &peer);
    let ours = set.dialled(&peer, dialled, arrival(2)).0.unwrap();
    let (decision, changes) = set.called(now, &peer, arrival(2));
    assert!(matches!(decision, Decision::Duplicate));
    assert_eq!(changes, []);
    assert_eq!(set.speaker(ours.channel), Some((peer, 2)));
}

#[test]
fn a_peer_that_does_not_drain_is_cut() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    let ticket = accepted(set.called(now, &peer, arrival(2)).0);
    assert_eq!(set.send(now, &peer, vec![0; QUEUE - 10]), []);
    let changes = set.send(now, &peer, vec![0; 11]);
    let [Change::Down { cause, .. }] = &changes[..] else {
        panic!("{changes:?}")
    };
    assert_eq!(cause.code, Code::PeerLost);
    assert!(cause.message.contains("limits.peer_queue_bytes"), "{cause}");
    assert!(is_cut(&ticket.outbox));
    assert_eq!(set.open_channels(), 0);
}

#[test]
fn nobody_calls_itself_by_our_name_or_is_ourselves() {
    let (mut set, now) = (set("a:1", 1), Instant::now());
    assert!(matches!(
        set.called(now, &address("a:1"), arrival(9)).0,
        Decision::Refuse(_)
    ));
    assert!(matches!(
        set.called(now, &address("localhost:1"), arrival(1)).0,
        Decision::Refuse(_)
    ));
}

#[test]
fn peers_are_bounded_and_those_that_failed_make_room() {
    let (mut set, mut now) = (set("a:1", 1), Instant::now());
    accepted(set.called(now, &address("b:1"), arrival(2)).0);
    for name in ["c:1", "d:1"] {
        let (dialled, _) = dial(&mut set, now, &address(name));
        set.dial_failed(now, &address(name), dialled, refusal());
    }
    // Both still pause: forgetting them would forget the pause.
    let over = set.send(now, &address("e:1"), vec![1]);
    assert!(
        matches!(&over[..], [Change::Down { cause, .. }] if cause.code == Code::OverLimit),
        "{over:?}"
    );
    assert!(matches!(
        set.called(now, &address("f:1"), arrival(5)).0,
        Decision::Refuse(_)
    ));
    now += LONGEST_PAUSE;
    dial(&mut set, now, &address("e:1"));
    accepted(set.called(now, &address("f:1"), arrival(5)).0);
    assert_eq!(set.states().len(), 3);
}

#[test]
fn lane_messages_open_no_channel() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    assert_eq!(set.send_if_open(now, &peer, vec![1]), []);
    assert_eq!(set.states(), []);
}

#[test]
fn once_finished_no_channel_is_opened_any_more() {
    let (mut set, peer, now) = (set("a:1", 1), address("b:1"), Instant::now());
    set.finish(&Fault::new(Code::Shutdown, "end"));
    assert_eq!(set.send(now, &peer, vec![1]), []);
    let (decision, changes) = set.called(now, &peer, arrival(2));
    let Decision::Refuse(why) = decision else {
        panic!("{decision:?}");
    };
    assert_eq!((why.code, changes), (Code::Shutdown, vec![]));
    assert_eq!(set.open_channels(), 0);
}
