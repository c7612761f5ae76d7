//! Who a peer is: certificates on both sides, signed by one authority.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::Code;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::config::{Advertised, TlsFiles};

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
        let key =
            PrivateKeyDer::from_pem_file(&files.key).map_err(|error| wrong("tls.key", &files.key, error))?;

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
        let why = format!(
            "peers will refuse this certificate: {error}; it must be signed by an authority in tls.ca, be valid now, and \
             be for {host:?}, the host of advertise (docs/security.md)"
        );
        wrong("tls.cert", &files.cert, why)
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
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|error| wrong(key, path, error))?;
    if certificates.is_empty() {
        return Err(wrong(key, path, "there is no certificate in it"));
    }
    Ok(certificates)
}

fn wrong(key: &'static str, path: &Path, message: impl ToString) -> TlsError {
    TlsError {
        key,
        file: path.display().to_string(),
        message: message.to_string(),
    }
}
