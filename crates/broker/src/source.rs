//! Names of engines as routers give them: `kvferry://node:port/engine`.

use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::Code;

use crate::io::PeerAddress;

/// Longest `host:port` in bytes: a DNS name has at most 253.
pub(crate) const MAX_ADDRESS: usize = 300;
/// Longest engine name in bytes, as the envelope bounds it.
pub(crate) const MAX_ENGINE: usize = 256;

/// An engine at its home daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) home: PeerAddress,
    pub(crate) engine: String,
}

pub(crate) fn parse_source(text: &str) -> Result<Source, Fault> {
    let invalid = |why: &str| {
        let shown: String = text.chars().take(100).collect();
        Fault::new(
            Code::AddressInvalid,
            format!("source {shown:?}: {why}; write kvferry://HOST:PORT/ENGINE"),
        )
    };
    let rest = text
        .strip_prefix("kvferry://")
        .ok_or_else(|| invalid("it does not begin with kvferry://"))?;
    let (address, engine) = rest
        .split_once('/')
        .ok_or_else(|| invalid("no /ENGINE after the address"))?;
    if engine.is_empty() || engine.len() > MAX_ENGINE || engine.contains('/') {
        return Err(invalid("the engine's name is empty, too long or holds a slash"));
    }
    let home = parse_address(address).map_err(invalid)?;
    Ok(Source {
        home,
        engine: engine.to_owned(),
    })
}

/// `host:port`; IPv6 in brackets.
pub(crate) fn parse_address(text: &str) -> Result<PeerAddress, &'static str> {
    let (host, port) = text.rsplit_once(':').ok_or("no :PORT")?;
    if text.len() > MAX_ADDRESS {
        return Err("the address is too long");
    }
    if host.is_empty() || host.contains(['/', '@', ' ']) {
        return Err("the host is empty or holds a character that none has");
    }
    if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
        return Err("an IPv6 host needs brackets");
    }
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|b| b.is_ascii_digit()) => Ok(PeerAddress(Arc::from(text))),
        _ => Err("the port is not a number from 1 to 65535"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_an_address_and_a_name() {
        let source = parse_source("kvferry://node-1:7400/prefill.a").unwrap();
        assert_eq!(&*source.home.0, "node-1:7400");
        assert_eq!(source.engine, "prefill.a");
        assert!(parse_source("kvferry://[::1]:7400/x").is_ok());
    }

    #[test]
    fn what_is_no_source_is_refused_by_name() {
        for text in [
            "",
            "node:1/x",
            "http://node:1/x",
            "kvferry://node:1",
            "kvferry://node:1/",
            "kvferry://node/x",
            "kvferry://:1/x",
            "kvferry://node:0/x",
            "kvferry://node:65536/x",
            "kvferry://node:+1/x",
            "kvferry://::1:7400/x",
            "kvferry://node:1/a/b",
            "kvferry://no de:1/x",
        ] {
            assert_eq!(
                parse_source(text).unwrap_err().code,
                Code::AddressInvalid,
                "{text}"
            );
        }
    }
}
