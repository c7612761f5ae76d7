//! Certificates for the nodes' peer channel: an authority that lives as long as the demo, and one certificate a node.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Files of one node.
#[derive(Clone, Debug)]
pub(crate) struct NodeCertificate {
    /// Certificate of the authority.
    pub(crate) ca: PathBuf,
    /// The node's certificate.
    pub(crate) cert: PathBuf,
    /// Its key.
    pub(crate) key: PathBuf,
}

/// An authority. Its key is never written down.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    ca: PathBuf,
}

impl Authority {
    /// Makes an authority and writes its certificate into `dir`.
    pub(crate) fn new(dir: &Path) -> anyhow::Result<Authority> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params
            .distinguished_name
            .push(DnType::CommonName, "Kvferry demo authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?;
        let ca = dir.join("ca.pem");
        fs::write(&ca, certificate.pem()).context("writing the authority's certificate")?;
        Ok(Authority {
            issuer: Issuer::new(params, key),
            ca,
        })
    }

    /// Makes the certificate of the node that peers connect to at `host`.
    pub(crate) fn certify(&self, dir: &Path, name: &str, host: &str) -> anyhow::Result<NodeCertificate> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![host.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        // Each daemon is a server to some peers and a client to others.
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = params.signed_by(&key, &self.issuer)?;
        let file = |suffix: &str| dir.join(format!("{name}.{suffix}"));
        let (cert, key_file) = (file("pem"), file("key"));
        fs::write(&cert, certificate.pem()).context("writing a certificate")?;
        fs::write(&key_file, key.serialize_pem()).context("writing a key")?;
        Ok(NodeCertificate {
            ca: self.ca.clone(),
            cert,
            key: key_file,
        })
    }
}
