//! Certificates that are renewed on disk are used without a restart.

use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use kvferry_dataplane::LaneTls;

use super::tls::{Tls, TlsError, check_own};
use crate::aside::aside;
use crate::config::TlsFiles;
use crate::log::Floods;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// The certificates that new connections use.
#[derive(Debug)]
pub(crate) struct Certificates {
    files: TlsFiles,
    /// The host by which peers know this daemon.
    host: String,
    now: RwLock<Tls>,
    pub(crate) lanes: LaneTls,
}

/// The files as they were once. What cannot be looked at is `None`.
type Stamp = [Option<[i64; 4]>; 3];

/// What was seen of the files.
#[derive(Debug)]
pub(crate) struct Watch {
    certificates: Arc<Certificates>,
    /// What was tried last.
    tried: Stamp,
    /// What was there at the last look.
    seen: Stamp,
}

impl Certificates {
    /// Reads them for the first time; `host` is the one by which peers know this daemon.
    pub(crate) fn load(files: &TlsFiles, host: &str) -> Result<(Arc<Certificates>, Watch), TlsError> {
        let stamp = stamp(files);
        let tls = Tls::load(files)?;
        let certificates = Arc::new(Certificates {
            files: files.clone(),
            host: host.to_owned(),
            lanes: LaneTls::new(Arc::clone(&tls.lane_client), Arc::clone(&tls.lane_server)),
            now: RwLock::new(tls),
        });
        certificates.doubt();
        let watch = Watch {
            certificates: Arc::clone(&certificates),
            tried: stamp,
            seen: stamp,
        };
        Ok((certificates, watch))
    }

    /// What a new connection is to use.
    pub(crate) fn current(&self) -> Tls {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// They are used all the same: peers have the last word.
    fn doubt(&self) {
        if let Err(error) = check_own(&self.files, &self.host) {
            tracing::warn!(%error, "certificates");
        }
    }
}

impl Watch {
    /// Looks until it is dropped.
    pub(crate) async fn run(self) {
        let floods = Floods::default();
        let watch = Arc::new(Mutex::new(self));
        loop {
            tokio::time::sleep(LOOK).await;
            // Off this thread: the disk may be a slow one. A look that is not done now is done at the next time.
            let watch = Arc::clone(&watch);
            let look = move || watch.lock().unwrap_or_else(PoisonError::into_inner).look();
            if let Err(error) = aside("certificates", look).await {
                let what = "certificates are not looked at now, and will be again";
                if floods.admit(what, None) {
                    tracing::warn!(%error, "{what}");
                }
            }
        }
    }

    /// Reads the files again if they changed, and nobody is changing them any more.
    fn look(&mut self) {
        let now = stamp(&self.certificates.files);
        let settled = std::mem::replace(&mut self.seen, now) == now;
        if now == self.tried || !settled {
            return;
        }
        self.tried = now;
        match Tls::load(&self.certificates.files) {
            Ok(tls) => {
                let lanes = &self.certificates.lanes;
                lanes.renew(Arc::clone(&tls.lane_client), Arc::clone(&tls.lane_server));
                *self
                    .certificates
                    .now
                    .write()
                    .unwrap_or_else(PoisonError::into_inner) = tls;
                tracing::info!("new connections use the renewed certificates");
                self.certificates.doubt();
            }
            Err(error) => {
                tracing::warn!(%error, "the new certificates are not good; those that were read before are kept");
            }
        }
    }
}

fn stamp(files: &TlsFiles) -> Stamp {
    [&files.ca, &files.cert, &files.key].map(|file| {
        let found = std::fs::metadata(file).ok()?;
        let inode = found.ino().cast_signed();
        Some([
            inode,
            found.size().cast_signed(),
            found.mtime(),
            found.mtime_nsec(),
        ])
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A certificate that is its own authority, for `host`; the authority's file.
    fn issue(directory: &Path, host: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![host.to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap();
        let file = |name: &str| directory.join(name);
        let files = TlsFiles {
            ca: file("ca.pem"),
            cert: file("cert.pem"),
            key: file("key.pem"),
        };
        std::fs::write(&files.ca, certificate.pem()).unwrap();
        std::fs::write(&files.cert, certificate.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }

    fn same(one: &Tls, other: &Tls) -> bool {
        Arc::ptr_eq(one.acceptor.config(), other.acceptor.config())
            && Arc::ptr_eq(one.connector.config(), other.connector.config())
    }

    #[test]
    fn what_changed_is_read_once_it_has_settled_and_what_is_broken_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let files = issue(directory.path(), "first.example");
        let (certificates, mut watch) = Certificates::load(&files, "first.example").unwrap();
        let first = certificates.current();
        watch.look();
        assert!(same(&first, &certificates.current()), "nothing changed");

        issue(directory.path(), "second.example");
        watch.look();
        assert!(same(&first, &certificates.current()), "it may still be written");
        watch.look();
        let second = certificates.current();
        assert!(!same(&first, &second));

        // A key of another certificate, then none at all.
        std::fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        watch.look();
        watch.look();
        assert!(same(&second, &certificates.current()));
        std::fs::remove_file(&files.key).unwrap();
        watch.look();
        watch.look();
        assert!(same(&second, &certificates.current()));

        issue(directory.path(), "third.example");
        watch.look();
        watch.look();
        assert!(!same(&second, &certificates.current()));
    }
}
