//! Regions: engines' memory that the data plane can reach, and what is refused.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use kvferry_handshake::Code;
use rustix::fs::{FileType, OFlags, SealFlags, fcntl_get_seals, fcntl_getfl, fstat, fstatfs};
use rustix::io::Errno;

use crate::memory::{Mapping, Span};
use crate::prefault::Prefault;
use crate::probe;
use crate::process::{EngineProcess, Remote};

/// Most regions of one owner.
const MAX_REGIONS: usize = 4096;
/// Longer regions are unmapped by a thread of their own.
const UNMAPPED_AT_ONCE: u64 = 16 << 20;
/// `f_type` of hugetlbfs (statfs(2)).
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x958458f6;

/// A mapped region; never reused within a daemon's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u64);

/// Why memory was refused. Names the field, both values and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RegisterError {
    code: Code,
    message: String,
}

/// Memory of an engine.
#[derive(Debug)]
pub(crate) struct Region {
    owner: u64,
    len: u64,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Mapped {
        mapping: Mapping,
        /// Kept for what may have to register it later, and because its identity is ours only while it is open.
        _fd: OwnedFd,
        identity: (u64, u64),
        offset: u64,
    },
    Process {
        process: Arc<EngineProcess>,
        address: u64,
    },
}

/// A byte range of a region, as it can be reached.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece<'r> {
    Mapped(Span<'r>),
    Process(&'r Arc<EngineProcess>, Remote),
}

/// All regions.
#[derive(Debug)]
pub(crate) struct Regions {
    most: usize,
    most_bytes: u64,
    table: Mutex<Table>,
    pub(crate) prefault: Prefault,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    regions: HashMap<RegionKey, Arc<Region>>,
    /// Regions and bytes that there are, or that are being mapped.
    taken: usize,
    taken_bytes: u64,
}

/// Room for a region. Given back when dropped, unless it was used.
struct Room<'r> {
    regions: &'r Regions,
    len: u64,
    used: bool,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if !self.used {
            self.regions.table().give_back(self.len);
        }
    }
}

impl Table {
    fn give_back(&mut self, len: u64) {
        self.taken -= 1;
        self.taken_bytes -= len;
    }
}

impl RegisterError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> RegisterError {
        RegisterError {
            code,
            message: message.into(),
        }
    }

    /// `region_kind`, `region_seals`, `region_out_of_bounds`, `region_overlap`, `region_unreachable` or
    /// `over_limit`.
    pub fn code(&self) -> Code {
        self.code
    }
}

impl Region {
    #[cfg(test)]
    pub(crate) fn of_nothing() -> Region {
        let process = Arc::new(EngineProcess::stated(0, 0));
        let memory = Memory::Process { process, address: 0 };
        Region {
            owner: 0,
            len: 0,
            memory,
        }
    }

    /// Bytes `[offset, offset + len)`, if they are inside.
    pub(crate) fn piece(&self, offset: u64, len: u64) -> Option<Piece<'_>> {
        match &self.memory {
            Memory::Mapped { mapping, .. } => mapping.span(offset, len).map(Piece::Mapped),
            Memory::Process { process, address } => {
                let inside = offset.checked_add(len)? <= self.len;
                let range = Remote {
                    address: address.checked_add(offset)?,
                    len: usize::try_from(len).ok()?,
                };
                inside.then_some(Piece::Process(process, range))
            }
        }
    }

    /// Its mapping, if it has one.
    pub(crate) fn mapping(&self) -> Option<&Mapping> {
        match &self.memory {
            Memory::Mapped { mapping, .. } => Some(mapping),
            Memory::Process { .. } => None,
        }
    }

    /// Whether they share bytes.
    fn overlap(&self, other: &Region) -> bool {
        let (a, b) = match (&self.memory, &other.memory) {
            (
                Memory::Mapped { identity, offset, .. },
                Memory::Mapped {
                    identity: other_identity,
                    offset: other_offset,
                    ..
                },
            ) if identity == other_identity => (*offset, *other_offset),
            (
                Memory::Process { process, address },
                Memory::Process {
                    process: other_process,
                    address: other_address,
                },
            ) if process.pid() == other_process.pid() => (*address, *other_address),
            _ => return false,
        };
        a < b.saturating_add(other.len) && b < a.saturating_add(self.len)
    }

    fn start(&self) -> u64 {
        match self.memory {
            Memory::Mapped { offset, .. } => offset,
            Memory::Process { address, .. } => address,
        }
    }
}

impl Regions {
    pub(crate) fn new(most: usize, most_bytes: u64) -> Regions {
        Regions {
            most,
            most_bytes,
            table: Mutex::default(),
            prefault: Prefault::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Room for a region, before it is mapped.
    fn room(&self, len: u64) -> Result<Room<'_>, RegisterError> {
        let mut table = self.table();
        let over = |message| Err(RegisterError::new(Code::OverLimit, message));
        if table.taken >= self.most {
            return over(format!(
                "regions: {} are registered with this daemon already, the most it takes (limits.regions); unregister some, or \
                 raise it",
                table.taken
            ));
        }
        let bytes = table.taken_bytes.checked_add(len);
        let Some(bytes) = bytes.filter(|bytes| *bytes <= self.most_bytes) else {
            return over(format!(
                "len {len}: {} bytes are registered with this daemon already, and it takes {} (limits.registered_bytes); \
                 unregister some, or raise it",
                table.taken_bytes, self.most_bytes
            ));
        };
        table.taken += 1;
        table.taken_bytes = bytes;
        Ok(Room {
            regions: self,
            len,
            used: false,
        })
    }

    pub(crate) fn map_memfd(
        &self,
        owner: u64,
        fd: OwnedFd,
        offset: u64,
        len: u64,
    ) -> Result<RegionKey, RegisterError> {
        let identity = check_memfd(&fd, offset, len)?;
        let room = self.room(len)?;
        let mapping = Mapping::new(&fd, offset, len).map_err(|error| {
            let message = format!(
                "mapping {len} bytes at offset {offset} of the memfd failed: {error}; see the daemon's address-space limit \
                 (ulimit -v) and vm.max_map_count"
            );
            RegisterError::new(Code::OverLimit, message)
        })?;
        let memory = Memory::Mapped {
            mapping,
            _fd: fd,
            identity,
            offset,
        };
        self.add(room, Region { owner, len, memory })
    }

    pub(crate) fn map_process(
        &self,
        owner: u64,
        process: Arc<EngineProcess>,
        address: u64,
        len: u64,
    ) -> Result<RegionKey, RegisterError> {
        probe::reachable(&process, address, len)?;
        let room = self.room(len)?;
        let memory = Memory::Process { process, address };
        self.add(room, Region { owner, len, memory })
    }

    fn add(&self, mut room: Room<'_>, region: Region) -> Result<RegionKey, RegisterError> {
        // Parameters are dropped after what is declared here: the table is unlocked before `room` gives back.
        let mut table = self.table();
        let of_owner = || table.regions.values().filter(|other| other.owner == region.owner);
        if of_owner().count() >= MAX_REGIONS {
            let message = format!(
                "regions: {MAX_REGIONS} are registered already, the most that one rank may have; use larger regions with \
                 several placements"
            );
            return Err(RegisterError::new(Code::OverLimit, message));
        }
        if let Some(other) = of_owner().find(|other| region.overlap(other)) {
            let message = format!(
                "bytes {} to {} share bytes with a registered region of {} to {}; register each byte once, and use one \
                 region with several placements",
                region.start(),
                region.start().saturating_add(region.len),
                other.start(),
                other.start().saturating_add(other.len),
            );
            return Err(RegisterError::new(Code::RegionOverlap, message));
        }
        table.last += 1;
        let key = RegionKey(table.last);
        let region = Arc::new(region);
        self.prefault.add(&region);
        table.regions.insert(key, region);
        room.used = true;
        Ok(key)
    }

    pub(crate) fn release(&self, key: RegionKey) {
        let region = {
            let mut table = self.table();
            let region = table.regions.remove(&key);
            if let Some(region) = &region {
                table.give_back(region.len);
            }
            region
        };
        // Unmapping what was touched takes the kernel up to 200 ms a GiB: neither under the lock nor in the time of
        // the caller, who serves everybody. Where no thread can be had, it is done here.
        if let Some(region) = region.filter(|region| region.len > UNMAPPED_AT_ONCE) {
            let unmap = std::thread::Builder::new().name("kvferry-unmap".to_owned());
            drop(unmap.spawn(move || drop(region)));
        }
    }

    pub(crate) fn get(&self, key: RegionKey) -> Option<Arc<Region>> {
        self.table().regions.get(&key).cloned()
    }

    /// Number of regions and their bytes.
    pub(crate) fn count(&self) -> (u64, u64) {
        let table = self.table();
        let count = u64::try_from(table.regions.len()).unwrap_or(u64::MAX);
        (count, table.regions.values().map(|region| region.len).sum())
    }
}

/// What must hold of a memfd before its memory is mapped. Gives its identity.
fn check_memfd(fd: &OwnedFd, offset: u64, len: u64) -> Result<(u64, u64), RegisterError> {
    let kind = |what: String| {
        let message = format!("fd: {what}; hand over exactly one memfd, opened for reading and writing");
        RegisterError::new(Code::RegionKind, message)
    };
    let unknown = |error: Errno| kind(format!("it cannot be examined ({error})"));
    let stat = fstat(fd).map_err(unknown)?;
    let file_type = FileType::from_raw_mode(stat.st_mode);
    if file_type != FileType::RegularFile {
        let named = match file_type {
            FileType::Directory => "a directory",
            FileType::Fifo => "a pipe",
            FileType::Socket => "a socket",
            FileType::CharacterDevice | FileType::BlockDevice => "a device",
            _ => "no file that can be mapped",
        };
        return Err(kind(format!("it is {named}, not a memfd")));
    }
    let seals = match fcntl_get_seals(fd) {
        Ok(seals) => seals,
        Err(Errno::INVAL) => return Err(kind("it is a file, not a memfd".to_owned())),
        Err(error) => return Err(unknown(error)),
    };
    check_seals(seals)?;
    // A page of a hugetlb memfd that its engine punched out can fail to come back, and touching it would then end the daemon.
    if fstatfs(fd).map_err(unknown)?.f_type == HUGETLBFS_MAGIC {
        return Err(kind(
            "it is a hugetlb memfd (MFD_HUGETLB), which the daemon cannot touch safely: use a plain one with \
             madvise(MADV_HUGEPAGE)"
                .to_owned(),
        ));
    }
    let mode = fcntl_getfl(fd).map_err(unknown)? & OFlags::RWMODE;
    if mode != OFlags::RDWR {
        return Err(kind("it is not open for reading and writing".to_owned()));
    }

    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let bounds = |message: String| RegisterError::new(Code::RegionOutOfBounds, message);
    if len == 0 {
        return Err(bounds("len is 0; register at least one byte".to_owned()));
    }
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(bounds(format!(
            "offset {offset} plus len {len} is beyond the memfd's size of {size} bytes; give a range inside it"
        )));
    }
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    if !offset.is_multiple_of(page) {
        return Err(bounds(format!(
            "offset {offset} is not a multiple of the system's page size of {page}; align it"
        )));
    }
    Ok((stat.st_dev, stat.st_ino))
}

/// SHRINK keeps a shared mapping from faulting, GROW keeps what was measured; with a WRITE seal nothing can be delivered.
fn check_seals(seals: SealFlags) -> Result<(), RegisterError> {
    let named = |seals: SealFlags| {
        let names: Vec<_> = seals
            .iter_names()
            .map(|(name, _)| format!("F_SEAL_{name}"))
            .collect();
        if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        }
    };
    let due = SealFlags::SHRINK | SealFlags::GROW;
    let unfit = SealFlags::WRITE | SealFlags::FUTURE_WRITE;
    let (missing, present) = (due - seals, seals & unfit);
    if missing.is_empty() && present.is_empty() {
        return Ok(());
    }
    let mut wrong = Vec::new();
    if !missing.is_empty() {
        wrong.push(format!("{} missing", named(missing)));
    }
    if !present.is_empty() {
        wrong.push(format!("{} must not be there", named(present)));
    }
    let message = format!(
        "seals: {} (the memfd has: {}); create it with MFD_ALLOW_SEALING, size it, then add F_SEAL_SHRINK and F_SEAL_GROW \
         only",
        wrong.join(", "),
        named(seals),
    );
    Err(RegisterError::new(Code::RegionSeals, message))
}
