//! A certificate authority for one test, and a certificate for each of its nodes.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Where a test's nodes are reached.
const LOCAL: [&str; 2] = ["localhost", "127.0.0.1"];

/// An authority, with its certificate in a file.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
    ca: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// PEM files of one node.
#[derive(Clone, Debug)]
pub struct NodeFiles {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// The node's certificate.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// A new authority that writes its files to `folder`.
    pub fn new(folder: &Path, name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let ca = folder.join(format!("{name}.pem"));
        std::fs::write(&ca, params.self_signed(&key).unwrap().pem()).unwrap();
        Authority {
            folder: folder.to_owned(),
            ca,
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate for a node that is reached at `localhost` and 127.0.0.1.
    pub fn node(&self, name: &str) -> NodeFiles {
        self.node_at(name, &LOCAL)
    }

    /// A certificate for a node that is reached at these hosts.
    pub fn node_at(&self, name: &str, hosts: &[&str]) -> NodeFiles {
        self.issue(name, hosts, CertificateParams::default())
    }

    /// The same, valid in the year before `year` only.
    pub fn node_until(&self, name: &str, year: i32) -> NodeFiles {
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(year - 1, 1, 1);
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        self.issue(name, &LOCAL, params)
    }

    fn issue(&self, name: &str, hosts: &[&str], validity: CertificateParams) -> NodeFiles {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        (params.not_before, params.not_after) = (validity.not_before, validity.not_after);
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = NodeFiles {
            ca: self.ca.clone(),
            cert: self.folder.join(format!("{name}.pem")),
            key: self.folder.join(format!("{name}.key")),
        };
        std::fs::write(&files.cert, certificate.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }
}
