//! Peer daemons: their lives, and what they say.

use kvferry_control::Fault;
use kvferry_handshake::Code;

use crate::Broker;
use crate::io::{Output, PeerAddress};
use crate::peer::{Body, PeerMessage};
use crate::ranks::RankLife;
use crate::wire::OutOfBounds;

impl Broker {
    pub(crate) fn peer_up(&mut self, peer: PeerAddress, incarnation: u64) {
        if self.is_own(&peer) {
            return;
        }
        match self.peers.insert(peer.clone(), incarnation) {
            Some(known) if known == incarnation => return,
            Some(_) => {
                let cause = Fault::new(Code::PeerLost, format!("the daemon at {} restarted", peer.0));
                self.lose_peer(&peer, &cause);
            }
            None => {}
        }
        self.find_home(&peer);
    }

    pub(crate) fn peer_down(&mut self, peer: &PeerAddress, cause: Fault) {
        if !self.is_own(peer) {
            self.peers.remove(peer);
            self.lose_peer(peer, &cause);
        }
    }

    /// Everything that is under way with the peer fails; engines stay.
    fn lose_peer(&mut self, peer: &PeerAddress, cause: &Fault) {
        self.given_up = Some(peer.clone());
        self.troubles.forget(peer);
        self.lose_home(peer, cause);
        self.lose_seats(peer);
        self.lose_links(peer, cause);
        self.lose_sources(peer, cause);
        self.lose_fetchers(peer, cause);
        self.given_up = None;
    }

    pub(crate) fn peer_said(&mut self, peer: PeerAddress, incarnation: u64, message: PeerMessage) {
        if self.is_own(&peer) {
            if incarnation != self.config.incarnation {
                return;
            }
        } else {
            match self.peers.get(&peer) {
                // From another life than the one that is up: late.
                Some(known) if *known != incarnation => return,
                Some(_) => {}
                None => self.peer_up(peer.clone(), incarnation),
            }
        }
        if message.to != 0 && message.to != self.config.incarnation {
            return;
        }
        if let Err(beyond) = message.check_bounds() {
            self.note_trouble(
                &peer,
                format!("a message beyond its bounds was dropped: {beyond}"),
            );
            self.beyond_bounds(&peer, incarnation, &message.body, &beyond);
            return self.emit(Output::Violation {
                peer,
                kind: "a peer's message beyond its bounds was dropped",
                what: beyond.to_string(),
            });
        }
        self.dispatch(peer, incarnation, message.body);
    }

    /// What was said of a transfer is not known: it would only wait for its deadline.
    fn beyond_bounds(&mut self, peer: &PeerAddress, incarnation: u64, body: &Body, beyond: &OutOfBounds) {
        let cause = Fault::new(
            Code::ProtocolViolation,
            format!("{} said what is beyond any bounds: {beyond}", peer.0),
        );
        match body {
            Body::PartState { fetch, rank, .. } => {
                let part = self.fetches.get(*fetch).and_then(|fetch| fetch.parts.get(rank));
                if part.is_some_and(|part| part.seat.peer == *peer && part.seat.incarnation == incarnation) {
                    self.fail_fetch(*fetch, cause);
                }
            }
            Body::FetchState { fetch, .. } => {
                for key in self.announced.of_fetch(peer, incarnation, *fetch) {
                    self.fail_part(&key, cause.clone().into());
                }
            }
            _ => {}
        }
    }

    fn dispatch(&mut self, peer: PeerAddress, incarnation: u64, body: Body) {
        match body {
            Body::Join { envelope, rank, life } => self.on_join(peer, incarnation, envelope, rank, life),
            Body::Joined { engine, rank, life } => self.on_joined(&peer, engine, rank, RankLife(life)),
            Body::JoinRefused { life, cause } => self.on_join_refused(&peer, RankLife(life), cause),
            Body::Keep { engine, rank, life } => self.on_keep(&peer, incarnation, engine, rank, life),
            Body::SeatLost { engine, life } => self.on_seat_lost(&peer, &engine, RankLife(life)),
            Body::Leave { name, rank, life } => self.on_leave(&peer, incarnation, &name, rank, life),
            Body::Detach { engine, cause } => self.on_detach(&peer, &engine, &cause),
            Body::Failed(failure) => self.on_failed(&peer, failure),
            Body::SiblingFailed(failure) => self.on_sibling_failed(&peer, failure),
            Body::Hint {
                home,
                name,
                transfer,
                by,
                declined,
            } => self.on_hint(&peer, &home, name, transfer, by, declined),
            Body::Expect {
                name,
                transfer,
                by,
                declined,
            } => {
                // Only its home speaks for an engine.
                if *by.home == *peer.0 && by.home_incarnation == incarnation {
                    self.on_expect(&name, transfer, by, declined);
                }
            }
            Body::Expected {
                engine,
                transfer,
                by,
                declined,
            } => self.on_expected(&peer, &engine, &transfer, &by, declined),
            Body::LinkOpen {
                name,
                decode,
                policy,
                envelope,
                known,
            } => self.on_link_open(&peer, incarnation, name, decode, policy, envelope, known.as_ref()),
            Body::NoLink { name, decode, cause } => self.on_no_link(&peer, name, decode, cause),
            Body::LinkNeedsEnvelope { name, decode } => self.on_link_needs_envelope(&peer, name, decode),
            Body::LinkAnswer(answer) => self.on_link_answer(&peer, incarnation, answer),
            Body::LinkOffer {
                engine,
                decode,
                policy,
                envelope,
            } => self.on_link_offer(&peer, &engine, decode, policy, envelope),
            Body::LinkFailed {
                engine,
                decode,
                verdict,
            } => self.on_link_failed(peer, &engine, &decode, verdict),
            Body::Announce(announce) => self.on_announce(&peer, incarnation, announce),
            Body::Ask { fetch, ranks, serial } => self.on_ask(&peer, incarnation, fetch, &ranks, serial),
            Body::PartState {
                fetch,
                rank,
                serial,
                moving,
                state,
            } => {
                if moving {
                    self.part_moves_there(&peer, incarnation, fetch, rank);
                }
                self.on_part_state(&peer, incarnation, fetch, rank, serial, state);
            }
            Body::FetchState { fetch, state } => self.on_fetch_state(&peer, incarnation, fetch, &state),
            Body::AskFetch { fetch } => self.on_ask_fetch(&peer, incarnation, fetch),
        }
    }
}
