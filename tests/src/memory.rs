//! Memory that is handed to a daemon, read and written through files, so that nothing here needs `unsafe`
//! whatever the daemon writes meanwhile.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

use kvferry_client::{RegionMemory, SealedMemory};

/// Which kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A sealed memfd.
    Memfd,
    /// Memory of the test's own process.
    Process,
}

/// Memory of one region.
#[derive(Debug)]
pub enum Memory {
    /// A sealed memfd.
    Memfd {
        /// As it is registered.
        sealed: SealedMemory,
        /// The same, for reading and writing.
        file: File,
    },
    /// Bytes of this process.
    Process {
        /// Keeps them. They are never looked at through this: another process writes them.
        bytes: Box<[u8]>,
        /// `/proc/self/mem`.
        file: File,
    },
}

impl Memory {
    /// `len` zeroed bytes.
    pub fn allocate(kind: Kind, name: &str, len: u64) -> Memory {
        match kind {
            Kind::Memfd => {
                let sealed = SealedMemory::create(name, len).unwrap();
                let file = File::from(sealed.as_fd().try_clone_to_owned().unwrap());
                Memory::Memfd { sealed, file }
            }
            Kind::Process => Memory::Process {
                bytes: vec![0; usize::try_from(len).unwrap()].into_boxed_slice(),
                file: OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open("/proc/self/mem")
                    .unwrap(),
            },
        }
    }

    /// As it is registered.
    pub fn region(&self) -> RegionMemory {
        match self {
            Memory::Memfd { sealed, .. } => sealed.region().unwrap(),
            Memory::Process { bytes, .. } => RegionMemory::Process {
                address: bytes.as_ptr().expose_provenance() as u64,
                len: bytes.len() as u64,
            },
        }
    }

    /// Writes at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let (file, start) = self.place();
        file.write_all_at(bytes, start + offset).unwrap();
    }

    /// Reads at `offset`.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let (file, start) = self.place();
        file.read_exact_at(out, start + offset).unwrap();
    }

    fn place(&self) -> (&File, u64) {
        match self {
            Memory::Memfd { file, .. } => (file, 0),
            Memory::Process { bytes, file } => (file, bytes.as_ptr().expose_provenance() as u64),
        }
    }
}
