//! Bounds on everything an envelope states. They are checked before anything is allocated or
//! computed from the value, so that a hostile envelope costs no more than its own bytes.

/// Ranks of an engine.
pub const MAX_RANKS: usize = 1024;
/// Page groups of an envelope.
pub const MAX_PAGE_GROUPS: usize = 64;
/// Components of an envelope.
pub const MAX_COMPONENTS: usize = 64;
/// Layers of a component, and one past the highest layer id.
pub const MAX_LAYERS: usize = 4096;
/// Parts of a component.
pub const MAX_PARTS: usize = 64;
/// Heads of a part, over all ranks.
pub const MAX_HEADS: u32 = 1 << 20;
/// Elements of one row.
pub const MAX_WIDTH: u32 = 1 << 28;
/// Tokens of a page.
pub const MAX_PAGE_SIZE: u32 = 1 << 16;
/// Tokens of a sliding window.
pub const MAX_WINDOW: u32 = 1 << 30;
/// Ranks that tokens, or a prompt, are split over.
pub const MAX_CONTEXT_PARALLEL: u32 = 1024;
/// Placements of all ranks together.
pub const MAX_PLACEMENTS: usize = 1 << 17;
/// (layer, part) pairs of all placements of all ranks together. A few bytes of an envelope place many of
/// them, and checking takes memory for each.
pub const MAX_PLACED: usize = 1 << 19;
/// Regions of a rank: each is a file descriptor and a registration.
pub const MAX_REGIONS: usize = 4096;
/// Bytes of a name (engine, page group, component, part, tag, framework).
pub const MAX_NAME: usize = 256;
/// Bytes of a model name, revision or digest: models are often named by a path.
pub const MAX_MODEL: usize = 1024;
/// One past the last byte of a region: file offsets are signed 64-bit numbers.
pub const MAX_REGION_BYTES: u64 = i64::MAX.unsigned_abs();
