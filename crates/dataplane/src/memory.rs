//! Mapped memory that is shared with an engine's process.
//!
//! The engine may write to it at any time, so no reference to its bytes is ever made: only raw pointers, and
//! copies by the kernel or by `memcpy`. What is read may change while it is read; nothing here, or in what
//! uses it, decides by it. Seals keep the memory from shrinking under the mapping.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;
/// How much of a span is fetched ahead of a copy: from there on the processor's own prefetcher has found the pattern.
#[cfg(target_arch = "x86_64")]
const FETCHED_BYTES: usize = 1024;

/// Bytes of a memfd, mapped shared for reading and writing.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

/// A range of mapped memory; the mapping outlives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'m> {
    base: NonNull<u8>,
    len: usize,
    mapping: PhantomData<&'m Mapping>,
}

// SAFETY: the mapping is plain memory that belongs to no thread; what is done to it is copying through raw pointers,
// which the engine's process may do at the same time anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}
// SAFETY: as above; a span is a pointer into a mapping that it cannot outlive.
unsafe impl Send for Span<'_> {}

impl Mapping {
    /// Maps `[offset, offset + len)`; `len` is not 0 and `offset` is a multiple of the page size.
    pub(crate) fn new(fd: &impl AsFd, offset: u64, len: u64) -> io::Result<Mapping> {
        let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(len).map_err(too_large)?;
        let offset = libc::off_t::try_from(offset).map_err(too_large)?;
        // SAFETY: no address is asked for, so no mapping that exists is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_fd().as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // KV caches hold people's prompts: they do not belong in a core dump of the daemon.
        // SAFETY: the range was mapped just now. Advice that fails changes nothing.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
        Ok(Mapping { base, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes page-table entries for the pages of `[offset, offset + len)` that the memfd has; holes stay holes, and contents
    /// stay what they are. `offset` is a multiple of the page size.
    ///
    /// Otherwise the first touch of each page is a fault, which costs several times as much (measured: copying 4 KiB
    /// pages for the first time takes three times as long).
    pub(crate) fn enter_pages(&self, offset: usize, len: usize) -> io::Result<()> {
        let page = rustix::param::page_size();
        let len = len.min(self.len.saturating_sub(offset));
        let mut resident = vec![0u8; len.div_ceil(page)];
        if resident.is_empty() {
            return Ok(());
        }
        // SAFETY: `offset` is below `self.len`, as `len` is not 0.
        let base = unsafe { self.base.add(offset) }.as_ptr();
        // SAFETY: `[base, base + len)` is mapped, and `resident` has a byte for each of its pages.
        if unsafe { libc::mincore(base.cast(), len, resident.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut at = 0;
        for run in resident.chunk_by(|a, b| a & 1 == b & 1) {
            if run[0] & 1 == 1 {
                let (start, bytes) = (base.wrapping_add(at * page), run.len() * page);
                // SAFETY: the run lies in the mapping, whose last page is mapped whole. Populating writes nothing.
                if unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) } != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            at += run.len();
        }
        Ok(())
    }

    /// Bytes `[offset, offset + len)`, if they are inside.
    pub(crate) fn span(&self, offset: u64, len: u64) -> Option<Span<'_>> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is at most `self.len`, so the result points into the mapping or one past it.
        let base = unsafe { self.base.add(offset) };
        Some(Span {
            base,
            len,
            mapping: PhantomData,
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `Mapping::new` mapped exactly this, and spans borrow from `self`, so none is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl<'m> Span<'m> {
    /// # Safety
    /// `base` and `len` are a part of a span that may be used for as long as `'m`.
    pub(crate) unsafe fn from_raw(base: *mut u8, len: usize) -> Span<'m> {
        Span {
            // SAFETY: a span's address is not null.
            base: unsafe { NonNull::new_unchecked(base) },
            len,
            mapping: PhantomData,
        }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// For system calls only: the kernel copies to or from there.
    pub(crate) fn as_ptr(self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The first `at` bytes, and the rest. `at` is at most the length.
    pub(crate) fn split(self, at: usize) -> (Span<'m>, Span<'m>) {
        let at = at.min(self.len);
        // SAFETY: `at` is at most `self.len`.
        let base = unsafe { self.base.add(at) };
        let (len, mapping) = (self.len - at, self.mapping);
        (Span { len: at, ..self }, Span { base, len, mapping })
    }

    /// Has the processor fetch the beginning into its cache, to be read soon.
    #[inline(always)]
    pub(crate) fn fetch_to_read(self) {
        #[cfg(target_arch = "x86_64")]
        self.each_line(|line| {
            // SAFETY: a prefetch never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
        });
    }

    /// The same, to be written soon.
    #[inline(always)]
    pub(crate) fn fetch_to_write(self) {
        #[cfg(target_arch = "x86_64")]
        self.each_line(|line| {
            // SAFETY: a prefetch never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(line) };
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn each_line(self, fetch: impl Fn(*const i8)) {
        let base: *const i8 = self.base.as_ptr().cast();
        for line in (0..self.len.min(FETCHED_BYTES)).step_by(LINE_BYTES) {
            fetch(base.wrapping_add(line));
        }
    }

    /// Copies as much as both hold from `source` to here. Where two engines registered one memfd, or parts of it, the two may
    /// share bytes: then what arrives is of no use to either engine, and harms nobody else.
    pub(crate) fn copy_from(self, source: Span<'_>) {
        let len = self.len.min(source.len);
        // SAFETY: both spans lie in mappings that outlive them, and `ptr::copy` bears any overlap within one mapping. That the
        // bytes change meanwhile, by the engine's process or because another mapping of the same memfd is written, is
        // memory shared between processes: what is copied is then undefined in value, and nothing depends on it.
        unsafe { std::ptr::copy(source.base.as_ptr(), self.base.as_ptr(), len) };
    }

    /// Copies private bytes to here, as many as fit.
    pub(crate) fn write(self, bytes: &[u8]) {
        let len = self.len.min(bytes.len());
        // SAFETY: the span lies in a mapping that outlives it; `bytes` is private memory, which no mapping of a memfd overlaps.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), len) };
    }

    /// Copies from here into private memory, as many bytes as fit.
    pub(crate) fn read(self, bytes: &mut [u8]) {
        let len = self.len.min(bytes.len());
        // SAFETY: as in `write`, the other way.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), bytes.as_mut_ptr(), len) };
    }

    /// Continues a CRC32C over these bytes, through a private copy.
    pub(crate) fn checksum(self, mut crc: u32) -> u32 {
        let mut copy = [0u8; 8192];
        let mut rest = self;
        while rest.len > 0 {
            let (head, tail) = rest.split(copy.len());
            let copy = &mut copy[..head.len];
            head.read(copy);
            crc = crc32c::crc32c_append(crc, copy);
            rest = tail;
        }
        crc
    }
}

#[cfg(test)]
mod tests {
    use super::Mapping;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn mapping(len: u64) -> Mapping {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Mapping::new(&fd, 0, len).unwrap()
    }

    #[test]
    fn a_span_is_inside_or_is_none() {
        let mapping = mapping(4096);
        assert!(mapping.span(0, 4096).is_some());
        assert!(mapping.span(4096, 0).is_some());
        assert!(mapping.span(1, 4096).is_none());
        assert!(mapping.span(4097, 0).is_none());
        assert!(mapping.span(u64::MAX, 2).is_none());
    }

    #[test]
    fn copies_go_where_they_say() {
        let (a, b) = (mapping(4096), mapping(4096));
        a.span(10, 5).unwrap().write(b"hello");
        b.span(100, 5).unwrap().copy_from(a.span(10, 5).unwrap());
        let mut read = [0u8; 7];
        b.span(99, 7).unwrap().read(&mut read);
        assert_eq!(&read, b"\0hello\0");
        let (he, llo) = b.span(100, 5).unwrap().split(2);
        assert_eq!((he.len(), llo.len()), (2, 3));
        let whole = b.span(0, 4096).unwrap();
        let mut bytes = vec![0u8; 4096];
        whole.read(&mut bytes);
        assert_eq!(whole.checksum(0), crc32c::crc32c(&bytes));
    }

    #[test]
    fn pages_that_are_there_are_entered_and_holes_stay_holes() {
        let page = rustix::param::page_size();
        let pages = 64;
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let len = u64::try_from(pages * page).unwrap();
        ftruncate(&fd, len).unwrap();
        // The second half has pages.
        let bytes = vec![7u8; pages / 2 * page];
        rustix::io::pwrite(&fd, &bytes, len / 2).unwrap();
        let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks;
        let mapping = Mapping::new(&fd, 0, len).unwrap();
        mapping.enter_pages(0, pages * page).unwrap();
        assert_eq!(
            rustix::fs::fstat(&fd).unwrap().st_blocks,
            blocks,
            "a hole was filled"
        );
        // /proc/PID/pagemap (bit 63: present) tells which pages have entries here.
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        let base = mapping.base.as_ptr().addr();
        let present = |at: usize| {
            let mut entry = [0u8; 8];
            let offset = u64::try_from((base / page + at) * 8).unwrap();
            std::os::unix::fs::FileExt::read_exact_at(&map, &mut entry, offset).unwrap();
            u64::from_le_bytes(entry) >> 63 == 1
        };
        assert_eq!((0..pages).filter(|at| present(*at)).count(), pages / 2);
        let mut read = vec![0u8; bytes.len()];
        mapping.span(len / 2, len / 2).unwrap().read(&mut read);
        assert!(read == bytes);
    }
}
