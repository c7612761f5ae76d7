//! The rules of opening, losing and opening again, without sockets.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Lanes, SenderEnd};
use crate::line::Taken;
use crate::wake::Wake;
use crate::{Config, LaneMessage, Token};

const TOKEN: Token = Token([3; 32]);

fn up() -> (Lanes, Instant, Config) {
    let mut lanes = Lanes::default();
    lanes.up(IpAddr::V4(Ipv4Addr::LOCALHOST));
    (lanes, Instant::now(), Config::default())
}

fn wake() -> Arc<Wake> {
    Arc::new(Wake::new().unwrap())
}

fn taken() -> Taken {
    crate::testing::send(1).1
}

fn end(epoch: u64, unacked: Vec<Taken>) -> SenderEnd {
    SenderEnd {
        lane: 0,
        epoch,
        unacked,
        orderly: false,
        carried: false,
    }
}

/// Lanes with lane 0 open at the sending end, in epoch 7.
fn sending() -> (Lanes, Instant, Config, Arc<Wake>) {
    let (mut lanes, now, config) = up();
    assert_eq!(
        lanes.open(now, &config, 1, || 5),
        [LaneMessage::Want { lane: 0, ask: 5 }]
    );
    let wake = wake();
    assert!(lanes.granted(0, 5, 7, &wake).is_some());
    (lanes, now, config, wake)
}

#[test]
fn as_many_lanes_are_asked_for_as_there_is_work_for() {
    let (mut lanes, now, config) = up();
    let mut ask = 0;
    let mut open = |lanes: &mut Lanes, demand| {
        lanes
            .open(now, &config, demand, || {
                ask += 1;
                ask
            })
            .len()
    };
    assert_eq!(open(&mut lanes, 0), 0);
    assert_eq!(open(&mut lanes, 1), 1);
    assert_eq!(open(&mut lanes, 1), 0, "it is asked for already");
    assert_eq!(open(&mut lanes, 100), config.lanes_per_peer - 1);
    lanes.down();
    assert_eq!(open(&mut lanes, 100), 0, "the channel is down");
}

#[test]
fn a_question_is_repeated_and_only_its_own_grant_counts() {
    let (mut lanes, now, config) = up();
    lanes.open(now, &config, 1, || 5);
    let (messages, next) = lanes.tick(now, &config);
    assert!(messages.is_empty());
    let later = next.unwrap();
    assert_eq!(
        lanes.tick(later, &config).0,
        [LaneMessage::Want { lane: 0, ask: 5 }]
    );
    let wake = wake();
    assert!(lanes.granted(0, 4, 7, &wake).is_none());
    assert!(lanes.granted(1, 5, 7, &wake).is_none());
    assert!(lanes.granted(0, 5, 7, &wake).is_some());
    assert!(
        lanes.granted(0, 5, 7, &wake).is_none(),
        "the same grant opened two connections"
    );
}

#[test]
fn what_is_in_doubt_comes_back_when_the_receiving_end_is_gone_and_not_before() {
    let (mut lanes, now, config, _wake) = sending();
    let due = lanes.sender_ended(now, &config, end(7, vec![taken()]));
    assert_eq!(due.messages, [LaneMessage::Lost { lane: 0, epoch: 7 }]);
    assert!(due.put_back.is_empty());
    assert!(
        lanes.open(now, &config, 1, || 6).len() == 1,
        "another lane may carry meanwhile"
    );
    assert!(lanes.gone(now, 0, 6).put_back.is_empty(), "another life's end");
    assert!(lanes.gone(now, 1, 7).put_back.is_empty(), "another lane's end");
    let again = lanes.tick(now + config.answer, &config).0;
    assert!(again.contains(&LaneMessage::Lost { lane: 0, epoch: 7 }));
    assert_eq!(lanes.gone(now, 0, 7).put_back.len(), 1);
    assert!(lanes.gone(now, 0, 7).put_back.is_empty(), "it came back twice");
}

#[test]
fn an_end_that_is_known_to_be_gone_leaves_no_doubt() {
    let (mut lanes, now, config, wake) = sending();
    assert!(
        lanes.gone(now, 0, 7).put_back.is_empty(),
        "its thread still has them"
    );
    assert!(wake.is_ending());
    let due = lanes.sender_ended(now, &config, end(7, vec![taken()]));
    assert_eq!((due.messages.len(), due.put_back.len()), (0, 1));
}

#[test]
fn what_was_in_doubt_when_the_channel_broke_never_comes_back() {
    let (mut lanes, now, config, wake) = sending();
    lanes.down();
    assert!(wake.is_ending());
    let due = lanes.sender_ended(now, &config, end(7, vec![taken()]));
    assert!(due.messages.is_empty() && due.put_back.is_empty());
    lanes.up(IpAddr::V4(Ipv4Addr::LOCALHOST));
    assert!(lanes.gone(now, 0, 7).put_back.is_empty());
}

#[test]
fn lanes_that_break_at_once_are_opened_more_and_more_rarely() {
    let (mut lanes, mut now, config, _wake) = sending();
    let mut pauses = Vec::new();
    for epoch in 7..17 {
        assert!(
            lanes
                .sender_ended(now, &config, end(epoch, Vec::new()))
                .messages
                .is_empty()
        );
        assert!(
            lanes.open(now, &config, 1, || 50).len() <= 1,
            "another lane may be asked for"
        );
        let next = lanes.tick(now, &config).1.unwrap();
        pauses.push(next - now);
        now = next.max(now + Duration::from_secs(5));
        lanes = reopened(lanes, now, &config, epoch + 1);
    }
    assert!(pauses.is_sorted(), "{pauses:?}");
    assert!(pauses[0] < Duration::from_millis(100) && *pauses.last().unwrap() >= Duration::from_secs(1));
}

/// Lane 0 asked for and granted again.
fn reopened(mut lanes: Lanes, now: Instant, config: &Config, epoch: u64) -> Lanes {
    // All lanes are asked for, so lane 0 is among them.
    let mut ask = epoch * 100;
    let messages = lanes.open(now, config, 100, || {
        ask += 1;
        ask
    });
    for message in messages {
        if let LaneMessage::Want { lane: 0, ask } = message {
            assert!(lanes.granted(0, ask, epoch, &wake()).is_some());
        }
    }
    lanes
}

#[test]
fn a_question_that_comes_twice_has_one_lane() {
    let (mut lanes, now, config) = up();
    let fresh = |epoch| move || Some((epoch, TOKEN));
    let want = |lanes: &mut Lanes, ask, epoch| lanes.wanted(now, &config, 0, ask, 99, fresh(epoch)).messages;
    let grant = |ask, epoch| LaneMessage::Grant {
        lane: 0,
        ask,
        epoch,
        token: TOKEN,
        port: 99,
    };
    assert_eq!(want(&mut lanes, 5, 70), [grant(5, 70)]);
    assert_eq!(want(&mut lanes, 5, 71), [grant(5, 70)], "the same grant again");
    let wake = wake();
    assert_eq!(lanes.proven(now, 70, &TOKEN, &wake), Some(0));
    assert!(want(&mut lanes, 5, 72).is_empty());
    assert!(want(&mut lanes, 4, 72).is_empty());
    assert!(!wake.is_ending(), "an old question ended the lane");
    // A new one takes the lane back: its old end goes first.
    assert!(want(&mut lanes, 6, 73).is_empty());
    assert!(wake.is_ending());
    let due = lanes.receiver_ended(now, &config, 0, 70, 99, fresh(74));
    assert_eq!(
        due.messages,
        [LaneMessage::Gone { lane: 0, epoch: 70 }, grant(6, 74)]
    );
}

#[test]
fn a_token_is_good_once_in_time_and_for_its_epoch() {
    let (mut lanes, now, config) = up();
    let granted = |lanes: &mut Lanes, ask, epoch| {
        assert_eq!(
            lanes
                .wanted(now, &config, 0, ask, 99, || Some((epoch, TOKEN)))
                .messages
                .len(),
            1
        );
    };
    let wake = wake();
    granted(&mut lanes, 1, 70);
    assert_eq!(lanes.proven(now, 70, &Token([4; 32]), &wake), None);
    assert_eq!(lanes.proven(now, 71, &TOKEN, &wake), None);
    assert_eq!(
        lanes.proven(now + config.hello * 2, 70, &TOKEN, &wake),
        None,
        "too late"
    );
    assert_eq!(lanes.proven(now, 70, &TOKEN, &wake), Some(0));
    assert_eq!(lanes.proven(now, 70, &TOKEN, &wake), None, "twice");
    lanes.receiver_ended(now, &config, 0, 70, 99, || None);
    granted(&mut lanes, 2, 72);
    lanes.down();
    assert_eq!(lanes.proven(now, 72, &TOKEN, &wake), None, "the channel is down");
}

#[test]
fn a_lost_lane_is_said_to_be_gone_only_once_it_is() {
    let (mut lanes, now, config) = up();
    let gone = |epoch| [LaneMessage::Gone { lane: 0, epoch }];
    assert_eq!(lanes.lost(0, 70).messages, gone(70), "there is none");
    lanes.wanted(now, &config, 0, 1, 99, || Some((70, TOKEN)));
    let wake = wake();
    lanes.proven(now, 70, &TOKEN, &wake);
    assert_eq!(lanes.lost(0, 69).messages, gone(69), "an earlier life");
    assert!(!wake.is_ending());
    assert!(lanes.lost(0, 70).messages.is_empty(), "it is not gone yet");
    assert!(wake.is_ending());
    assert_eq!(
        lanes.receiver_ended(now, &config, 0, 70, 99, || None).messages,
        gone(70)
    );
    assert_eq!(lanes.lost(0, 70).messages, gone(70));
    // A grant that was not used dies too, since the peer says that it is lost.
    lanes.wanted(now, &config, 0, 2, 99, || Some((71, TOKEN)));
    assert_eq!(lanes.lost(0, 71).messages, gone(71));
    assert_eq!(lanes.proven(now, 71, &TOKEN, &wake), None);
}

#[test]
fn a_peer_asks_for_a_bounded_number_of_lanes() {
    let (mut lanes, now, config) = up();
    for lane in 0..u16::MAX {
        lanes.wanted(now, &config, lane, 1, 99, || Some((u64::from(lane), TOKEN)));
    }
    assert_eq!(lanes.count()[2], usize::from(super::MAX_LANES));
}

#[test]
fn a_lane_that_does_not_open_is_no_failing_peer_while_another_carries() {
    let (mut lanes, now, config, _wake) = sending();
    lanes.opening_failed(now, || "refused".to_owned());
    assert!(lanes.failing.is_some(), "nothing carries yet");
    lanes.sender_proven(7);
    assert!(lanes.failing.is_none());
    lanes.opening_failed(now, || "refused".to_owned());
    assert!(lanes.failing.is_none(), "lane 0 carries");
    lanes.sender_ended(now, &config, end(7, Vec::new()));
    lanes.opening_failed(now, || "refused".to_owned());
    assert!(lanes.failing.is_some(), "nothing carries any more");
}
