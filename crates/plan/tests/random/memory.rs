//! Memory that is as large as any offset says and holds only what was written: one per rank.

use std::collections::HashMap;

const BLOCK: u64 = 1024;

/// 0 is a byte that nobody wrote.
#[derive(Default)]
pub(crate) struct Memory {
    blocks: HashMap<(u16, u64), Vec<u8>>,
    /// Bytes written.
    pub(crate) written: u64,
}

impl Memory {
    pub(crate) fn read(&self, region: u16, offset: u64) -> u8 {
        let block = self.blocks.get(&(region, offset / BLOCK));
        block.map_or(0, |block| block[(offset % BLOCK) as usize])
    }

    /// Writes bytes that are not 0, none of which was written before; false if any was.
    pub(crate) fn write(&mut self, region: u16, offset: u64, bytes: &[u8]) -> bool {
        let mut fresh = true;
        let mut at = 0;
        while at < bytes.len() {
            let offset = offset + at as u64;
            let inside = (offset % BLOCK) as usize;
            let len = (BLOCK as usize - inside).min(bytes.len() - at);
            let block = self.blocks.entry((region, offset / BLOCK));
            let block = block.or_insert_with(|| vec![0; BLOCK as usize]);
            let into = &mut block[inside..inside + len];
            fresh &= into.iter().all(|byte| *byte == 0);
            into.copy_from_slice(&bytes[at..at + len]);
            at += len;
        }
        self.written += bytes.len() as u64;
        fresh
    }

    pub(crate) fn read_into(&self, region: u16, offset: u64, bytes: &mut Vec<u8>, len: u64) {
        bytes.clear();
        let mut at = 0;
        while at < len {
            let offset = offset + at;
            let inside = offset % BLOCK;
            let part = (BLOCK - inside).min(len - at);
            match self.blocks.get(&(region, offset / BLOCK)) {
                Some(block) => bytes.extend_from_slice(&block[inside as usize..(inside + part) as usize]),
                None => bytes.resize(bytes.len() + part as usize, 0),
            }
            at += part;
        }
    }
}
