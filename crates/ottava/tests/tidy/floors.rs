//! The floors of the library crates.

/// The floors of a crate's top modules, or of files in them (`"folder/file"`). The longest matching entry counts. `""` matches any module.
pub type Floors = &'static [(&'static str, u8)];

/// The library crates, lower crates first. A file may import from its own floor and from lower floors.
pub const FLOORS: &[(&str, Floors)] = &[
    (
        "ottava-tensor",
        &[
            ("capability", 0),
            ("dtype", 0),
            ("element", 0),
            ("error", 0),
            ("fp8", 0),
            ("granularity", 0),
            ("parts", 0),
            ("poison", 0),
            ("wide", 0),
            ("cuda", 1),
            ("host_transfer", 1),
            ("device", 1),
            ("tracker", 1),
            ("planted", 1),
            ("quantized", 1),
            ("snapshot", 1),
            ("staging", 1),
            ("stored", 1),
            ("tensor", 1),
            ("bench", 2),
            ("comm", 2),
            ("ops", 2),
            ("testing", 2),
        ],
    ),
    ("ottava-files", &[("", 3)]),
    ("ottava-jinja", &[("", 3)]),
    ("ottava-common", &[("", 3)]),
    ("ottava-http", &[("", 3)]),
    ("ottava-hub", &[("", 3)]),
    ("ottava-recipe", &[("", 3)]),
    ("ottava-models", &[("", 5), ("layers", 4)]),
    ("ottava-data", &[("", 6)]),
    ("ottava-rewards", &[("", 6)]),
    ("ottava-parallel", &[("", 6)]),
    ("ottava-sentinel", &[("", 6)]),
    ("ottava-checkpoint", &[("", 6)]),
    ("ottava-engine", &[("", 6)]),
    ("ottava-settings", &[("", 7)]),
    ("ottava-convert", &[("", 7)]),
    ("ottava-train", &[("", 7)]),
    ("ottava-serve", &[("", 8)]),
];
