//! Memory that an engine hands over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::ClientError;

/// A memfd of fixed size, sealed as the daemon requires (SHRINK and GROW, no WRITE seal).
///
/// Mapping it is the caller's matter.
#[derive(Debug)]
pub struct SealedMemory {
    fd: OwnedFd,
    len: u64,
}

/// Memory to register as one region. The client keeps it, so that it can register it again with a
/// daemon that restarted.
#[derive(Debug)]
pub enum RegionMemory {
    /// `[offset, offset + len)` of a memfd.
    Memfd {
        /// The memfd.
        fd: OwnedFd,
        /// Byte offset; a multiple of the system's page size.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// `[address, address + len)` of this process.
    Process {
        /// Address.
        address: u64,
        /// Bytes.
        len: u64,
    },
}

impl SealedMemory {
    /// Makes a memfd of `len` bytes, zeroed, and seals its size. `name` shows in /proc.
    pub fn create(name: &str, len: u64) -> Result<SealedMemory, ClientError> {
        let make = || -> io::Result<OwnedFd> {
            let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            rustix::fs::ftruncate(&fd, len)?;
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok(fd)
        };
        let fd = make().map_err(|cause| ClientError::Memory {
            what: "making a sealed memfd",
            cause,
        })?;
        Ok(SealedMemory { fd, len })
    }

    /// Has the system give it its pages now, charged to this process: else they are charged to whoever touches them
    /// first, which for pages that are delivered is the daemon.
    pub fn allocate(&self) -> Result<(), ClientError> {
        if self.len == 0 {
            return Ok(());
        }
        let allocated = rustix::fs::fallocate(&self.fd, rustix::fs::FallocateFlags::empty(), 0, self.len);
        allocated.map_err(|cause| ClientError::Memory {
            what: "allocating the pages of a memfd",
            cause: cause.into(),
        })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole of it as a region.
    pub fn region(&self) -> Result<RegionMemory, ClientError> {
        self.region_of(0, self.len)
    }

    /// `[offset, offset + len)` of it as a region.
    pub fn region_of(&self, offset: u64, len: u64) -> Result<RegionMemory, ClientError> {
        let fd = self.fd.try_clone().map_err(|cause| ClientError::Memory {
            what: "duplicating a memfd",
            cause,
        })?;
        Ok(RegionMemory::Memfd { fd, offset, len })
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::SealedMemory;

    #[test]
    fn pages_are_there_once_they_are_allocated() {
        let memory = SealedMemory::create("pool", 1 << 20).unwrap();
        let bytes = || rustix::fs::fstat(&memory).unwrap().st_blocks * 512;
        assert_eq!(bytes(), 0);
        memory.allocate().unwrap();
        assert_eq!(bytes(), 1 << 20);
        SealedMemory::create("none", 0).unwrap().allocate().unwrap();
    }
}
