//! Plots over the steps of a run: `loss.svg`, and the series of the sentinel.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
/// The margins: left, right, top, bottom.
const MARGIN: [f64; 4] = [64.0, 24.0, 48.0, 52.0];

/// Colours of medium brightness without a background, readable on white pages and on dark pages.
const TEXT: &str = "#7d848e";
const TRAIN: &str = "#3b82f6";
const EVAL: &str = "#f0731a";

/// The maximum number of points of a line. More points cannot be seen and would make the file large.
const MAX_POINTS: usize = 1000;

/// A step and a loss, as coordinates.
type Point = (f64, f64);

/// Returns the points of `series` that are finite.
fn finite(series: &[(u64, f64)]) -> Vec<Point> {
    series.iter().filter(|point| point.1.is_finite()).map(|&(step, value)| (step as f64, value)).collect()
}

/// Draws losses over steps: training losses as a faint line, their running mean as a strong line, and losses of evaluations as dots joined by a line.
/// Points must be in the order of steps. Points that are not finite are left out.
pub fn loss_svg(title: &str, train: &[(u64, f64)], eval: &[(u64, f64)]) -> String {
    let (train, eval) = (finite(train), finite(eval));
    picture(title, |svg| {
        if train.is_empty() && eval.is_empty() {
            return empty(svg, "no loss to show yet");
        }
        let smooth = running_mean(&train);
        let frame = Frame::around(&thin(&train), &eval);
        frame.axes(svg, "loss (nats)");
        frame.line(svg, &thin(&train), &format!("stroke=\"{TRAIN}\" stroke-opacity=\"0.3\""));
        frame.line(svg, &thin(&smooth), &format!("stroke=\"{TRAIN}\" stroke-width=\"2\""));
        frame.dots(svg, &eval, EVAL);
        legend(svg, [("train", TRAIN, smooth.last()), ("eval", EVAL, eval.last())]);
    })
}

/// Draws a number over steps as dots joined by a line. `unit` is the unit of the number. Points must be in the order of steps. Points that are not
/// finite are left out.
pub fn series_svg(title: &str, unit: &str, points: &[(u64, f64)]) -> String {
    let points = thin(&finite(points));
    picture(title, |svg| {
        if points.is_empty() {
            return empty(svg, "nothing to show yet");
        }
        let frame = Frame::around(&points, &[]);
        frame.axes(svg, unit);
        frame.dots(svg, &points, TRAIN);
    })
}

fn picture(title: &str, draw: impl FnOnce(&mut String)) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"{TEXT}\">\n"
    );
    let title = escape(title);
    push(&mut svg, format_args!("<text x=\"{}\" y=\"26\" font-size=\"16\">{title}</text>", MARGIN[0]));
    draw(&mut svg);
    svg.push_str("</svg>\n");
    svg
}

fn empty(svg: &mut String, text: &str) {
    push(svg, format_args!("<text x=\"{}\" y=\"{}\">{text}</text>", MARGIN[0], HEIGHT / 2.0));
}

/// The range of the data, and its place on the page.
struct Frame {
    steps: Ticks,
    losses: Ticks,
}

impl Frame {
    fn around(train: &[Point], eval: &[Point]) -> Frame {
        let all = || train.iter().chain(eval);
        Frame { steps: Ticks::covering(all().map(|p| p.0), true), losses: Ticks::covering(all().map(|p| p.1), false) }
    }

    fn x(&self, step: f64) -> f64 {
        MARGIN[0] + self.steps.share(step) * (WIDTH - MARGIN[0] - MARGIN[1])
    }

    fn y(&self, loss: f64) -> f64 {
        HEIGHT - MARGIN[3] - self.losses.share(loss) * (HEIGHT - MARGIN[2] - MARGIN[3])
    }

    fn axes(&self, svg: &mut String, unit: &str) {
        let (left, right, bottom) = (MARGIN[0], WIDTH - MARGIN[1], HEIGHT - MARGIN[3]);
        for loss in self.losses.values() {
            let (y, label) = (self.y(loss), self.losses.label(loss));
            push(svg, format_args!("<path d=\"M{left} {y:.1}H{right}\" stroke=\"{TEXT}\" stroke-opacity=\"0.25\"/>"));
            push(
                svg,
                format_args!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 8.0, y + 4.5),
            );
        }
        for step in self.steps.values() {
            let (x, label) = (self.x(step), self.steps.label(step));
            push(svg, format_args!("<path d=\"M{x:.1} {bottom}v5\" stroke=\"{TEXT}\"/>"));
            push(svg, format_args!("<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 20.0));
        }
        push(svg, format_args!("<path d=\"M{left} {bottom}H{right}\" stroke=\"{TEXT}\"/>"));
        let (middle, below) = ((left + right) / 2.0, HEIGHT - 12.0);
        push(svg, format_args!("<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">step</text>"));
        let half = (MARGIN[2] + bottom) / 2.0;
        push(
            svg,
            format_args!("<text transform=\"translate(18 {half})rotate(-90)\" text-anchor=\"middle\">{unit}</text>"),
        );
    }

    /// Draws dots joined by a line.
    fn dots(&self, svg: &mut String, points: &[Point], colour: &str) {
        self.line(svg, points, &format!("stroke=\"{colour}\" stroke-width=\"1.5\""));
        for &(step, value) in points {
            let (x, y) = (self.x(step), self.y(value));
            push(svg, format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"));
        }
    }

    fn line(&self, svg: &mut String, points: &[Point], style: &str) {
        if points.len() > 1 {
            let points: Vec<_> = points.iter().map(|p| format!("{:.1},{:.1}", self.x(p.0), self.y(p.1))).collect();
            push(
                svg,
                format_args!(
                    "<polyline fill=\"none\" stroke-linejoin=\"round\" {style} points=\"{}\"/>",
                    points.join(" ")
                ),
            );
        }
    }
}

/// Ticks at round numbers along an axis.
struct Ticks {
    low: f64,
    high: f64,
    step: f64,
}

impl Ticks {
    /// Returns about six ticks, with distances of 1, 2 or 5 times a power of ten. An axis of `whole` numbers ends at the last value, and other axes
    /// end at a tick.
    fn covering(values: impl Iterator<Item = f64>, whole: bool) -> Ticks {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        // A single value gets a range around it. The minimum range keeps the step above rounding errors.
        let span = (high - low).max(low.abs().max(high.abs()) * 1e-6).max(1e-9);
        let rough = span / 6.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&step| step >= rough).unwrap_or(span);
        if whole {
            return Ticks { low, high: high.max(low + 1.0), step: step.max(1.0) };
        }
        Ticks { low: (low / step).floor() * step, high: (low + span).max(high).div_euclid(step) * step + step, step }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        let first = (self.low / self.step - 1e-9).ceil();
        let count = ((self.high / self.step + 1e-9).floor() - first) as usize;
        (0..=count.min(20)).map(move |i| (first + i as f64) * self.step)
    }

    fn label(&self, value: f64) -> String {
        let decimals = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{value:.decimals$}")
    }
}

/// Returns the mean over a window around each point, except around the first and the last points. The window has a twentieth of all points, so the mean is
/// smooth and not delayed.
fn running_mean(points: &[Point]) -> Vec<Point> {
    let half = points.len() / 40;
    let mut sums = vec![0.0];
    for (_, loss) in points {
        sums.push(sums[sums.len() - 1] + loss);
    }
    // Near an end, the window shrinks on both sides. A window that shrank on one side would shift the mean.
    let reach = |i: usize| half.min(i).min(points.len() - 1 - i);
    let mean = |i: usize, reach: usize| (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) as f64;
    // The mean of a few points at an end is as noisy as the points, so the line ends before it.
    let inner = points.iter().enumerate().filter(|(i, _)| 2 * reach(*i) >= half);
    inner.map(|(i, &(step, _))| (step, mean(i, reach(i)))).collect()
}

/// Returns at most [`MAX_POINTS`] of the points: the lowest and the highest point of each group, so no spike is lost.
fn thin(points: &[Point]) -> Vec<Point> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let groups = points.chunks(points.len().div_ceil(MAX_POINTS / 2));
    let ends = groups.flat_map(|group| {
        let at = |better: fn(f64, f64) -> bool| {
            (1..group.len()).fold(0, |best, i| if better(group[i].1, group[best].1) { i } else { best })
        };
        let (low, high) = (at(|a, b| a < b), at(|a, b| a > b));
        [group[low.min(high)], group[low.max(high)]]
    });
    ends.collect()
}

/// Draws names and last values at the upper right. The first entry is leftmost.
fn legend(svg: &mut String, entries: [(&str, &str, Option<&Point>); 2]) {
    let mut x = WIDTH - MARGIN[1];
    for (name, colour, last) in entries.into_iter().rev() {
        if let Some((_, loss)) = last {
            push(svg, format_args!("<text x=\"{x}\" y=\"26\" text-anchor=\"end\">{name} {loss:.3}</text>"));
            push(svg, format_args!("<path d=\"M{} 21.5h20\" stroke=\"{colour}\" stroke-width=\"3\"/>", x - 100.0));
            x -= 124.0;
        }
    }
}

pub(super) fn push(svg: &mut String, element: std::fmt::Arguments) {
    writeln!(svg, "{element}").expect("writing to a string does not fail");
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_data() {
        for (values, expected) in [
            (vec![2.13, 8.4], vec![2.0, 4.0, 6.0, 8.0, 10.0]),
            (vec![3.02, 3.11], vec![3.02, 3.04, 3.06, 3.08, 3.1, 3.12]),
            (vec![-1.0, 1.0], vec![-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]),
        ] {
            let ticks = Ticks::covering(values.iter().copied(), false);
            let found: Vec<_> = ticks.values().map(|v| (v * 1e6).round() / 1e6).collect();
            assert_eq!(found, expected);
            assert!(values.iter().all(|&v| (0.0..=1.0).contains(&ticks.share(v))));
        }
        let steps = Ticks::covering([1.0, 200.0].into_iter(), true);
        assert_eq!(steps.values().map(|v| steps.label(v)).collect::<Vec<_>>(), ["50", "100", "150", "200"]);
    }

    #[test]
    fn the_mean_follows_a_slope_and_smooths_noise() {
        let slope: Vec<_> = (0..400).map(|i| (f64::from(i), f64::from(i))).collect();
        let mean = running_mean(&slope);
        let inner = (slope.len() - mean.len()) / 2;
        assert_eq!(mean, slope[inner..slope.len() - inner]);
        let noise: Vec<_> = (0..400).map(|i| (f64::from(i), f64::from(i % 2))).collect();
        // The smallest window has 11 alternating values, five or six values of 1, so its mean differs from a half by 1/22 = 0.045.
        assert!(running_mean(&noise).iter().all(|p| (p.1 - 0.5).abs() < 0.05));
    }

    #[test]
    fn thinning_keeps_spikes() {
        let mut points: Vec<_> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        (points[777].1, points[778].1) = (9.0, -9.0);
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS);
        assert!(thinned.contains(&(777.0, 9.0)) && thinned.contains(&(778.0, -9.0)));
        assert!(thinned.is_sorted_by_key(|p| p.0));
    }

    #[test]
    fn hard_inputs_give_finite_pictures() {
        for points in [vec![], vec![(5, 2.0)], vec![(1, 2.0), (2, 2.0)], vec![(1, f64::NAN), (2, 3.0)], vec![(0, 0.0)]]
        {
            for (train, eval) in [(&points, &vec![]), (&vec![], &points), (&points, &points)] {
                let svg = loss_svg("a <b> & c", train, eval);
                assert!(svg.contains("a &lt;b> &amp; c") && svg.ends_with("</svg>\n"));
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
        assert!(loss_svg("", &[(1, f64::INFINITY)], &[]).contains("no loss to show yet"));
        let gaps = series_svg("gap", "nats", &[(1, 0.01), (101, f64::NAN), (201, -0.02)]);
        assert!(gaps.contains(">nats</text>") && gaps.matches("<circle").count() == 2, "{gaps}");
        assert!(series_svg("gap", "nats", &[]).contains("nothing to show yet"));
        let huge = loss_svg("", &[(1, 1e300), (u64::MAX, -1e300)], &[]);
        assert!(!huge.contains("NaN") && !huge.contains("inf"), "{huge}");
    }
}
