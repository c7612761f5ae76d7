//! The engine's KV memory: a sealed memfd, or memory of this process.
//!
//! Both are read and written without a mapping that others write into: a memfd by `pread` and `pwrite`, process memory
//! through atomics. So nothing here needs `unsafe`, whatever the daemon writes meanwhile.

use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::Context as _;
use kvferry_client::{RegionMemory, SealedMemory};
use rustix::io::Errno;

/// Memory of one region.
#[derive(Debug)]
pub(crate) enum PoolMemory {
    /// A sealed memfd.
    Memfd(SealedMemory),
    /// Memory of this process, which the daemon reaches by `process_vm_readv` and `process_vm_writev`.
    Process(Box<[AtomicU8]>),
}

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum MemoryKind {
    /// A sealed memfd, mapped by the daemon: one copy
    Memfd,
    /// Memory that the engine has already, reached through a bounce buffer
    Process,
}

impl PoolMemory {
    /// Zeroed memory. Its pages are this process's, whoever writes them first.
    pub(crate) fn allocate(kind: MemoryKind, name: &str, len: u64) -> anyhow::Result<PoolMemory> {
        match kind {
            MemoryKind::Memfd => {
                let memfd = SealedMemory::create(name, len)?;
                memfd.allocate()?;
                Ok(PoolMemory::Memfd(memfd))
            }
            MemoryKind::Process => {
                let len = usize::try_from(len).context("the region does not fit into the address space")?;
                let mut bytes = Vec::new();
                bytes
                    .try_reserve_exact(len)
                    .with_context(|| format!("no memory for a region of {len} bytes"))?;
                bytes.extend(std::iter::repeat_with(AtomicU8::default).take(len));
                Ok(PoolMemory::Process(bytes.into_boxed_slice()))
            }
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            PoolMemory::Memfd(memfd) => memfd.len(),
            PoolMemory::Process(bytes) => bytes.len() as u64,
        }
    }

    /// As the daemon is handed it.
    pub(crate) fn region(&self) -> anyhow::Result<RegionMemory> {
        match self {
            PoolMemory::Memfd(memfd) => Ok(memfd.region()?),
            PoolMemory::Process(bytes) => Ok(RegionMemory::Process {
                address: bytes.as_ptr().addr() as u64,
                len: bytes.len() as u64,
            }),
        }
    }

    /// Reads `out.len()` bytes at `offset`.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> anyhow::Result<()> {
        match self {
            PoolMemory::Memfd(memfd) => {
                let mut done = 0;
                while done < out.len() {
                    match rustix::io::pread(memfd, &mut out[done..], offset + done as u64) {
                        Ok(0) => anyhow::bail!("read beyond the end of the pool at {}", offset + done as u64),
                        Ok(count) => done += count,
                        Err(Errno::INTR) => {}
                        Err(error) => return Err(error).context("reading the pool"),
                    }
                }
            }
            PoolMemory::Process(bytes) => {
                let bytes = slice(bytes, offset, out.len())?;
                for (out, byte) in out.iter_mut().zip(bytes) {
                    *out = byte.load(Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Writes `data` at `offset`.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> anyhow::Result<()> {
        match self {
            PoolMemory::Memfd(memfd) => {
                let mut done = 0;
                while done < data.len() {
                    match rustix::io::pwrite(memfd, &data[done..], offset + done as u64) {
                        Ok(0) => {
                            anyhow::bail!("write beyond the end of the pool at {}", offset + done as u64)
                        }
                        Ok(count) => done += count,
                        Err(Errno::INTR) => {}
                        Err(error) => return Err(error).context("writing the pool (is there memory left?)"),
                    }
                }
            }
            PoolMemory::Process(bytes) => {
                for (byte, data) in slice(bytes, offset, data.len())?.iter().zip(data) {
                    byte.store(*data, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

fn slice(bytes: &[AtomicU8], offset: u64, len: usize) -> anyhow::Result<&[AtomicU8]> {
    let range = usize::try_from(offset)
        .ok()
        .and_then(|first| Some(first..first.checked_add(len)?));
    range
        .and_then(|range| bytes.get(range))
        .with_context(|| format!("{len} bytes at {offset} lie outside the pool of {}", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_hold_what_was_written_and_keep_their_bounds() {
        for kind in [MemoryKind::Memfd, MemoryKind::Process] {
            let memory = PoolMemory::allocate(kind, "test", 8192).unwrap();
            assert_eq!(memory.len(), 8192);
            memory.write(4090, b"twelve bytes").unwrap();
            let mut out = [1; 14];
            memory.read(4089, &mut out).unwrap();
            assert_eq!(&out, b"\0twelve bytes\0");
            assert!(
                memory.read(8190, &mut out).is_err(),
                "{kind:?} read beyond its end"
            );
            assert!(memory.write(8190, &out).is_err(), "{kind:?} wrote beyond its end");
        }
    }
}
