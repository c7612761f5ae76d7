//! Whoever never gets the answer that helps asks again from a timer, not at once: two daemons must not keep each other
//! busy.

use kvferry_broker::{Body, PartState};
use kvferry_handshake::Code;

use crate::engines::id;
use crate::scene::pair;
use crate::sim::{Cluster, DEADLINE};

/// Fetches from one node at another, with every message changed, until the fetch fails; how often each of `kinds` was
/// said.
fn insist(change: impl FnMut(&mut Body) + Send + 'static, kinds: [&str; 2]) -> [u64; 2] {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0, 0], &[1]);
    let mut change = change;
    cluster.change(move |_, message| {
        change(&mut message.body);
        true
    });
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(2 * DEADLINE);
    let code = cluster.codes_of(d, &id("a", 0))[0];
    assert!(code.is_some_and(Code::can_retry), "it ends: {code:?}");
    kinds.map(|kind| cluster.said.get(kind).copied().unwrap_or_default())
}

#[test]
fn a_daemon_that_never_knows_the_fetch() {
    for late in [false, true] {
        let unknown = move |body: &mut Body| {
            if let Body::PartState { state, serial, .. } = body {
                *state = PartState::Unknown;
                *serial = if late { u64::MAX } else { *serial };
            }
        };
        let [announced, asked] = insist(unknown, ["Announce", "Ask"]);
        assert!((1..=9).contains(&announced), "{announced} announcements");
        assert!((1..=9).contains(&asked), "{asked} questions");
    }
}

#[test]
fn a_daemon_that_never_takes_the_link() {
    let never = |body: &mut Body| {
        if let Body::PartState { state, .. } = body {
            *state = PartState::NeedsLink;
        }
    };
    let [announced, offered] = insist(never, ["Announce", "LinkOffer"]);
    assert!((1..=9).contains(&announced), "{announced} announcements");
    assert!((1..=9).contains(&offered), "{offered} offers");
}

#[test]
fn a_home_that_never_says_what_its_engine_is() {
    let bare = |body: &mut Body| {
        if let Body::LinkAnswer(answer) = body {
            answer.envelope = None;
        }
    };
    let [asked, answered] = insist(bare, ["LinkOpen", "LinkAnswer"]);
    assert!((1..=30).contains(&asked), "{asked} questions");
    assert!((1..=30).contains(&answered), "{answered} answers");
}

#[test]
fn a_home_that_needs_the_envelope_again_and_again() {
    let mut turn = false;
    let forgets = move |body: &mut Body| {
        let Body::LinkAnswer(answer) = body else {
            return;
        };
        turn = !turn;
        if turn {
            // A rank is missing: it is asked for until it is there.
            answer.seats[0] = None;
        } else {
            *body = Body::LinkNeedsEnvelope {
                name: answer.engine.name.clone(),
                decode: answer.decode.clone(),
            };
        }
    };
    let [asked, _] = insist(forgets, ["LinkOpen", "LinkAnswer"]);
    assert!((1..=40).contains(&asked), "{asked} questions");
}

#[test]
fn a_home_that_names_ever_new_lives_of_a_rank() {
    let mut life = 1 << 60;
    let wrong = move |body: &mut Body| {
        if let Body::LinkAnswer(answer) = body {
            for seat in answer.seats.iter_mut().flatten() {
                life += 1;
                seat.life = life;
            }
        }
    };
    let [asked, announced] = insist(wrong, ["LinkOpen", "Announce"]);
    assert!((1..=30).contains(&asked), "{asked} questions");
    assert!((1..=30).contains(&announced), "{announced} announcements");
}
