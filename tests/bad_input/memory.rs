//! Memory that cannot be registered.

use std::os::fd::OwnedFd;

use kvferry_client::{RegionMemory, SealedMemory};
use kvferry_handshake::{Code, Launch, ModelShape, Role};
use kvferry_tests::engine::{attach_rank, named, refused};
use kvferry_tests::geometry::launch;
use kvferry_tests::node::Options;
use kvferry_tests::wait::{PATIENCE, within};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::{SMALL, bystanders, check, small};

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("bad", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_used_is_refused_by_name() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let of_memfd = |seals, offset, len| RegionMemory::Memfd {
        fd: memfd(2 * SMALL, seals),
        offset,
        len,
    };
    let of_fd = |fd: OwnedFd| RegionMemory::Memfd {
        fd,
        offset: 0,
        len: SMALL,
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(SMALL).unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let own = [0u8; 16];
    let address = own.as_ptr().expose_provenance() as u64;
    let of_process = |address, len| RegionMemory::Process { address, len };
    let cases = [
        (
            "no seals",
            0,
            of_memfd(SealFlags::empty(), 0, SMALL),
            Code::RegionSeals,
            &["SHRINK", "GROW"][..],
        ),
        (
            "no GROW seal",
            0,
            of_memfd(SealFlags::SHRINK, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_GROW missing"],
        ),
        (
            "no SHRINK seal",
            0,
            of_memfd(SealFlags::GROW, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_SHRINK missing"],
        ),
        (
            "a WRITE seal",
            0,
            of_memfd(sealed | SealFlags::WRITE, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_WRITE"],
        ),
        (
            "a FUTURE_WRITE seal",
            0,
            of_memfd(sealed | SealFlags::FUTURE_WRITE, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_FUTURE_WRITE"],
        ),
        (
            "too short",
            0,
            of_memfd(sealed, 0, SMALL - 1),
            Code::RegionTooSmall,
            &["8191", "8192"],
        ),
        (
            "oversized",
            0,
            RegionMemory::Memfd {
                fd: memfd(1 << 40, sealed),
                offset: 0,
                len: 1 << 40,
            },
            Code::RegionTooLarge,
            &["region 0", "1099511627776", "8192", "2097152"],
        ),
        (
            "longer than the memfd",
            0,
            of_memfd(sealed, 0, 3 * SMALL),
            Code::RegionOutOfBounds,
            &["24576", "16384"],
        ),
        (
            "begins behind the end",
            0,
            of_memfd(sealed, 4 * SMALL, SMALL),
            Code::RegionOutOfBounds,
            &["32768"],
        ),
        (
            "wraps",
            0,
            of_memfd(sealed, u64::MAX - 4095, SMALL),
            Code::RegionOutOfBounds,
            &["offset"],
        ),
        (
            "not aligned",
            0,
            of_memfd(sealed, 100, SMALL),
            Code::RegionOutOfBounds,
            &["100", "4096"],
        ),
        (
            "empty",
            0,
            of_memfd(sealed, 0, 0),
            Code::RegionTooSmall,
            &["0 bytes", "8192"],
        ),
        ("a file", 0, of_fd(file.into()), Code::RegionKind, &["memfd"]),
        ("a pipe", 0, of_fd(reader.into()), Code::RegionKind, &["memfd"]),
        (
            "no such region",
            7,
            of_memfd(sealed, 0, SMALL),
            Code::RegionUnknown,
            &["7"],
        ),
        (
            "addresses that are not mapped",
            0,
            of_process(4_096, SMALL),
            Code::RegionOutOfBounds,
            &["region 0"],
        ),
        (
            "addresses that wrap",
            0,
            of_process(u64::MAX - 100, SMALL),
            Code::RegionOutOfBounds,
            &["region 0"],
        ),
        (
            "a process's few bytes",
            0,
            of_process(address, 16),
            Code::RegionTooSmall,
            &["16", "8192"],
        ),
    ];
    let rank = attach_rank(&small(), 0, &bystanders.nodes[0], bystanders.nodes[0].address())
        .await
        .unwrap();
    for (what, region, memory, code, names) in cases {
        let answer = within(PATIENCE, what, rank.register(region, memory)).await;
        check(&refused(answer, what), code, names, what);
    }
    // Nothing of it is left: what is right is taken, once.
    let good = SealedMemory::create("good", SMALL).unwrap();
    rank.register(0, good.region().unwrap()).await.unwrap();
    let again = SealedMemory::create("again", SMALL).unwrap();
    let fault = refused(rank.register(0, again.region().unwrap()).await, "twice");
    check(
        &fault,
        Code::RegionRegistered,
        &["region 0", "unregister"],
        "twice",
    );
    rank.unregister(0).await.unwrap();
    let fault = refused(rank.unregister(0).await, "unregistered twice");
    check(&fault, Code::RegionUnknown, &["region 0"], "unregistered twice");
    drop(rank);
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_that_share_bytes_are_refused() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    // A region for each layer and part: four of them.
    let model = ModelShape::new("small", 2).kv(0..2, 1, 64);
    let launch = Launch {
        pool_pages: 2,
        allocation: kvferry_handshake::Allocation::LayerPart,
        ..launch(1, 16)
    };
    let envelope = named(&launch.envelope(&model).unwrap(), "small", Role::Both);
    let rank = attach_rank(&envelope, 0, &bystanders.nodes[0], bystanders.nodes[0].address())
        .await
        .unwrap();
    let half = SMALL / 2;
    let memory = SealedMemory::create("shared", 4 * half).unwrap();
    rank.register(0, memory.region_of(0, half).unwrap())
        .await
        .unwrap();
    for (offset, len) in [(0, half), (0, 2 * half)] {
        let fault = refused(
            rank.register(1, memory.region_of(offset, len).unwrap()).await,
            "overlapping",
        );
        check(&fault, Code::RegionOverlap, &["region 1"], "overlapping");
    }
    rank.register(1, memory.region_of(half, half).unwrap())
        .await
        .unwrap();
    let bytes = vec![0u8; 3 * 4096];
    let address = bytes.as_ptr().expose_provenance() as u64;
    rank.register(2, RegionMemory::Process { address, len: half })
        .await
        .unwrap();
    let overlapping = RegionMemory::Process {
        address: address + half - 1,
        len: half,
    };
    let fault = refused(rank.register(3, overlapping).await, "overlapping addresses");
    check(
        &fault,
        Code::RegionOverlap,
        &["region 3"],
        "overlapping addresses",
    );
    drop(rank);
    drop(bytes);
    bystanders.go_on().await;
}
