//! Who a peer is: certificates on both sides, signed by one authority.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::Code;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::config::{Advertised, TlsFiles};
use crate::files;

/// What is wrong with the certificates.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {file}: {message}")]
pub struct TlsError {
    key: &'static str,
    file: String,
    message: String,
}

/// Both roles of a daemon: it shows the same certificate in either.
#[derive(Clone)]
pub(crate) struct Tls {
    pub(crate) connector: TlsConnector,
    pub(crate) acceptor: TlsAcceptor,
    pub(crate) lane_client: Arc<ClientConfig>,
    pub(crate) lane_server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the files.
    pub(crate) fn load(files: &TlsFiles) -> Result<Tls, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = [&rustls::version::TLS13];
        let roots = Arc::new(authorities(files)?);
        let chain = certificates("tls.cert", &files.cert)?;
        let key = private_key(&files.key)?;

        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .map_err(|error| wrong("tls.cert", &files.cert, error))?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|error| key_unfit(files, &error))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|error| wrong("tls.ca", &files.ca, error))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|error| wrong("tls.cert", &files.cert, error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(|error| key_unfit(files, &error))?;

        // The protocol's name keeps a channel from being taken for a lane, and the other way round.
        let (mut lane_client, mut lane_server) = (client.clone(), server.clone());
        lane_client.alpn_protocols = vec![b"kvferry-lane".to_vec()];
        lane_server.alpn_protocols = vec![b"kvferry-lane".to_vec()];
        client.alpn_protocols = vec![b"kvferry-peer".to_vec()];
        server.alpn_protocols = vec![b"kvferry-peer".to_vec()];
        Ok(Tls {
            connector: TlsConnector::from(Arc::new(client)),
            acceptor: TlsAcceptor::from(Arc::new(server)),
            lane_client: Arc::new(lane_client),
            lane_server: Arc::new(lane_server),
        })
    }
}

/// Whether peers that know this daemon as `host` will believe its certificate, as a server and as a client.
pub(crate) fn check_own(files: &TlsFiles, host: &str) -> Result<(), TlsError> {
    let chain = certificates("tls.cert", &files.cert)?;
    let Some((own, between)) = chain.split_first() else {
        return Ok(());
    };
    let unbelieved = |error: rustls::Error| {
        let why = unbelieved(&error, files, host);
        wrong(
            "tls.cert",
            &files.cert,
            format!("peers will refuse this certificate: {why} (docs/security.md)"),
        )
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(authorities(files)?);
    let no_verifier = |error: VerifierBuilderError| wrong("tls.ca", &files.ca, error);
    let name =
        ServerName::try_from(host.to_owned()).map_err(|error| wrong("tls.cert", &files.cert, error))?;
    WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .map_err(no_verifier)?
        .verify_server_cert(own, between, &name, &[], UnixTime::now())
        .map_err(unbelieved)?;
    WebPkiClientVerifier::builder_with_provider(roots, provider)
        .build()
        .map_err(no_verifier)?
        .verify_client_cert(own, between, UnixTime::now())
        .map_err(unbelieved)?;
    Ok(())
}

/// Whether certificates or the protocol are at fault, as opposed to a connection that broke.
pub(crate) fn is_of_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

/// The name that the certificate of the daemon at `address` must have.
pub(crate) fn server_name(address: &Advertised) -> Result<ServerName<'static>, Fault> {
    ServerName::try_from(address.host().to_owned()).map_err(|error| {
        let message = format!(
            "{address}: {:?} cannot be in a certificate: {error}",
            address.host()
        );
        Fault::new(Code::PeerTls, message)
    })
}

/// Whether a peer whose certificate was verified may call itself `address`.
pub(crate) fn check_name(
    certificates: Option<&[CertificateDer<'_>]>,
    address: &Advertised,
) -> Result<(), Fault> {
    let refuse = |why: String| {
        Fault::new(
            Code::PeerTls,
            format!(
                "the daemon that calls itself {address} shows a certificate that is not for {:?} ({why}); put the \
                 host of its advertise key into its certificate as a subject alternative name",
                address.host()
            ),
        )
    };
    let Some(certificate) = certificates.and_then(<[_]>::first) else {
        return Err(refuse("it showed none".to_owned()));
    };
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| refuse(error.to_string()))?;
    verify_server_name(&parsed, &server_name(address)?).map_err(|error| refuse(error.to_string()))
}

fn authorities(files: &TlsFiles) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates("tls.ca", &files.ca)? {
        let added = roots.add(authority);
        added.map_err(|error| wrong("tls.ca", &files.ca, error))?;
    }
    Ok(roots)
}

fn key_unfit(files: &TlsFiles, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(_) => {
            let cert = files.cert.display();
            let why = format!("it is not the key of the certificate in {cert} (tls.cert)");
            wrong("tls.key", &files.key, why)
        }
        other => wrong("tls.key", &files.key, other),
    }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let content = content(key, path)?;
    let read = CertificateDer::pem_slice_iter(&content).collect::<Result<Vec<_>, _>>();
    let certificates = read.map_err(|error| wrong(key, path, error))?;
    if certificates.is_empty() {
        return Err(wrong(
            key,
            path,
            "there is no certificate in it; PEM with BEGIN CERTIFICATE is wanted",
        ));
    }
    Ok(certificates)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&content("tls.key", path)?).map_err(|error| {
        let why = match error {
            pem::Error::NoItemsFound => {
                "there is no private key in it; PEM with BEGIN PRIVATE KEY is wanted".to_owned()
            }
            other => other.to_string(),
        };
        wrong("tls.key", path, why)
    })
}

fn content(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    files::read(path).map_err(|error| wrong(key, path, format!("cannot be read: {error}")))
}

/// Why a certificate is not believed, and what to do.
fn unbelieved(error: &rustls::Error, files: &TlsFiles, host: &str) -> String {
    let rustls::Error::InvalidCertificate(why) = error else {
        return format!("{error}");
    };
    match why {
        CertificateError::ExpiredContext { time, not_after } => format!(
            "it was valid until {}, and now is {}; issue a new one",
            utc(not_after.as_secs()),
            utc(time.as_secs())
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "it is valid from {} on, and now is {}; look at this node's clock, or issue a new one",
            utc(not_before.as_secs()),
            utc(time.as_secs())
        ),
        CertificateError::UnknownIssuer => format!(
            "no authority in {} (tls.ca) signed it, nor the intermediate certificates behind it; issue it by that \
             authority, or name its own in tls.ca on all nodes",
            files.ca.display()
        ),
        CertificateError::NotValidForNameContext { presented, .. } => format!(
            "it is for {}, and the host of advertise is {host:?}; issue one for that host, or set advertise to a name \
             that it has",
            presented.join(", ")
        ),
        other => format!(
            "{other}; it must be signed by an authority in tls.ca, be valid now, and be for {host:?}, the host of advertise"
        ),
    }
}

/// Seconds since 1970 as a date and time. Days are counted in eras of 400 years that begin in March, so that the leap day
/// is the last of its year.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = era * 400 + year + next;
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

fn wrong(key: &'static str, path: &Path, message: impl ToString) -> TlsError {
    TlsError {
        key,
        file: path.display().to_string(),
        message: message.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_as_dates() {
        for (seconds, shown) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_609_459_199, "2020-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), shown);
        }
    }
}
