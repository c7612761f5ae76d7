//! Random pairs of engines.

pub(crate) mod axes;
pub(crate) mod case;
pub(crate) mod draw;
pub(crate) mod engine;
pub(crate) mod memory;
pub(crate) mod model;
pub(crate) mod reference;
pub(crate) mod spoil;
