//! Lanes with TLS: the same bytes, and no connection without the right certificate.

use std::sync::Arc;
use std::time::Duration;

use kvferry_dataplane::{Config, LaneTls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::pair::{self, Faults, Flow, LARGE, Pair, Proxy, Size, Spell, close, config};

/// Certificates of one authority for both ends of a lane.
fn certificates() -> LaneTls {
    certificates_for(&["a", "b"])
}

fn certificates_for(names: &[&str]) -> LaneTls {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(authority.as_ref().der().clone()).unwrap();
    let roots = Arc::new(roots);
    let mut params =
        CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate().unwrap();
    let certificate: CertificateDer<'static> = params.signed_by(&key, &authority).unwrap().der().clone();
    let key = || PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .unwrap();
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.clone()], key())
        .unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key())
        .unwrap();
    LaneTls::new(Arc::new(client), Arc::new(server))
}

fn encrypted(tls: &LaneTls) -> Config {
    Config {
        tls: Some(tls.clone()),
        ..config()
    }
}

const ROWS: Size = Size {
    layers: 6,
    tokens: 1500,
    page_size: 1,
    width: 288,
};

#[test]
fn encrypted_lanes_carry_the_same_bytes() {
    let tls = certificates();
    let pair = Pair::new(encrypted(&tls));
    for (seed, size) in [(1, LARGE), (2, ROWS)] {
        Flow::new(&pair.a, &pair.b, size, seed).carry(&pair);
    }
    assert_eq!(pair.a.plane.traffic()[0].lost_lanes, 0);
}

#[test]
fn encrypted_lanes_that_are_cut_or_changed_are_opened_again() {
    let tls = certificates();
    let one_lane = || Config {
        lanes_per_peer: 1,
        ..encrypted(&tls)
    };
    let pair = Pair::with(one_lane(), one_lane(), Faults::none());
    let proxy = Proxy::new(pair.b.plane.listen_address(), |n| match n {
        0 => Spell::Cut(100_000),
        1 => Spell::Corrupt(100_000),
        2 => Spell::Corrupt(100),
        _ => Spell::Nothing,
    });
    pair.faults
        .port
        .store(proxy.port, std::sync::atomic::Ordering::Relaxed);
    Flow::new(&pair.a, &pair.b, LARGE, 1).carry(&pair);
    assert!(pair.a.plane.traffic()[0].lost_lanes >= 3);
}

#[test]
fn a_closed_send_leaves_an_encrypted_lane_at_once() {
    let tls = certificates();
    let pair = Pair::new(encrypted(&tls));
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    for step in 0..8 {
        let (send, receive) = flow.start(&pair);
        std::thread::sleep(Duration::from_millis(step * 2));
        close(&pair, send, receive);
    }
    flow.carry(&pair);
}

#[test]
fn a_stranger_or_a_plain_peer_carries_nothing() {
    let (ours, theirs) = (certificates(), certificates());
    let misnamed = certificates_for(&["a", "c"]);
    for (a, b) in [
        (encrypted(&theirs), encrypted(&ours)),
        (config(), encrypted(&ours)),
        (encrypted(&misnamed), encrypted(&misnamed)),
    ] {
        let pair = Pair::with(a, b, Faults::none());
        let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
        let before = flow.decode.ranks[0].bytes();
        let (send, receive) = flow.start(&pair);
        pair.until_lost(3);
        assert!(before == flow.decode.ranks[0].bytes());
        assert_eq!(pair::count(&pair.a.plane.counts(), "chunks_in_doubt"), 0);
        close(&pair, send, receive);
        assert_eq!(pair.a.log.seen(send).closed[0].bytes, 0);
    }
}
