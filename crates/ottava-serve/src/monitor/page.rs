//! The files of the page that shows runs.

/// A file that the server sends.
pub struct PageFile {
    /// The path of the file in its URL.
    pub path: &'static str,
    /// Its media type.
    pub kind: &'static str,
    /// The content of the file.
    pub bytes: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// All files of the page. uPlot 1.6.32 is from the npm registry, under the licence in `page/uplot.LICENSE`.
pub const FILES: [PageFile; 11] = [
    PageFile { path: "/", kind: HTML, bytes: include_str!("page/index.html") },
    PageFile { path: "/icon.svg", kind: SVG, bytes: include_str!("page/icon.svg") },
    PageFile { path: "/monitor.css", kind: CSS, bytes: include_str!("page/monitor.css") },
    PageFile { path: "/monitor.js", kind: SCRIPT, bytes: include_str!("page/monitor.js") },
    PageFile { path: "/charts.js", kind: SCRIPT, bytes: include_str!("page/charts.js") },
    PageFile { path: "/axes.js", kind: SCRIPT, bytes: include_str!("page/axes.js") },
    PageFile { path: "/settings.js", kind: SCRIPT, bytes: include_str!("page/settings.js") },
    PageFile { path: "/runs.js", kind: SCRIPT, bytes: include_str!("page/runs.js") },
    PageFile { path: "/words.js", kind: SCRIPT, bytes: include_str!("page/words.js") },
    PageFile { path: "/uplot.js", kind: SCRIPT, bytes: include_str!("page/uplot.js") },
    PageFile { path: "/uplot.css", kind: CSS, bytes: include_str!("page/uplot.css") },
];
