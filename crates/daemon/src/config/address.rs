//! `host:port`, by which daemons name each other.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// An address that peers and routers can use: a DNS name or IP address, and a port. It is a daemon's
/// identity, so it is kept as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertised {
    host: String,
    port: u16,
}

/// Text that is no such address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not HOST:PORT with a host of letters, digits, '.', '-' (or [IPv6]) and a port from 1 to 65535"
)]
pub struct AdvertisedError {
    text: String,
}

impl Advertised {
    /// The host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl From<SocketAddr> for Advertised {
    fn from(address: SocketAddr) -> Advertised {
        Advertised {
            host: address.ip().to_string(),
            port: address.port(),
        }
    }
}

impl FromStr for Advertised {
    type Err = AdvertisedError;

    fn from_str(text: &str) -> Result<Advertised, AdvertisedError> {
        let error = || AdvertisedError {
            text: text.chars().take(300).collect(),
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(error)?;
        let port: u16 = match port.parse::<u16>() {
            Ok(port) if port != 0 && port.to_string().len() == text.len() - host.len() - 1 => port,
            _ => return Err(error()),
        };
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bracketed {
            Some(inner) => inner
                .parse::<IpAddr>()
                .ok()
                .filter(IpAddr::is_ipv6)
                .map(|_| inner),
            None => is_name(host).then_some(host),
        };
        Ok(Advertised {
            host: host.ok_or_else(error)?.to_owned(),
            port,
        })
    }
}

fn is_name(host: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.' || c == '_';
    !host.is_empty() && host.len() <= 253 && host.chars().all(known)
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_back() {
        for text in ["node-1:7460", "10.0.0.1:1", "[fe80::1]:65535", "a.b_c:80"] {
            assert_eq!(text.parse::<Advertised>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_named() {
        for text in [
            "",
            "node",
            "node:",
            ":7460",
            "node:0",
            "node:65536",
            "node:+1",
            "node:01",
            "fe80::1:80",
            "[node]:80",
            "[10.0.0.1]:80",
            "no de:80",
            "node/x:80",
            "a@b:80",
        ] {
            let error = text.parse::<Advertised>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("{text:?}")), "{text}");
        }
    }
}
